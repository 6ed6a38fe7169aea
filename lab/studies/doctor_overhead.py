"""How much slower is a script under the doctor? Lesson 03 on two ranks, in turn with torchrun and with the doctor.

python lab/studies/doctor_overhead.py          # three pairs of runs, some minutes
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402

PAIRS = 3
FLAGS = ["train.py", "--epochs", "2", "--limit_train", "6400", "--limit_val", "640", "--num_workers", "0", "--run_dir"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DOCTOR = [sys.executable, "-m", "rankdoctor"]
WAYS = {
    "torchrun": TORCHRUN,
    "the doctor, whole epochs (`--full`)": [*DOCTOR, "--full", "--no_redirect"],
    "the doctor, eight batches of each pass": [*DOCTOR, "--no_redirect"],
}


def measured(command: list[str], run_dir: str) -> float:
    """Return the seconds of a run."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    folder = REPOSITORY / "03_ddp"
    subprocess.run([*command, *FLAGS, run_dir], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def main() -> None:
    """Measure all ways in turn, and store the table."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(PAIRS):
            for way, command in WAYS.items():
                found[way].append(measured(command, f"{folder}/{pair}_{way.replace(' ', '_')}"))
    rows: list[list[results.Cell]] = []
    for way, seconds in found.items():
        ratios = [mine / others for mine, others in zip(seconds, found["torchrun"], strict=True)]
        rows.append([way, *([statistics.median(each), min(each), max(each)] for each in (seconds, ratios))])
    results.store(
        "doctor_overhead",
        title="Lesson 03 on two ranks with and without the doctor",
        columns=["started by", "seconds", "seconds, of those with torchrun"],
        rows=rows,
        formats={"seconds": ".1f", "seconds, of those with torchrun": ".2f"},
        spread=f"median (lowest to highest) of {PAIRS} runs",
        command="python lab/studies/doctor_overhead.py",
    )


if __name__ == "__main__":
    main()
