"""How much slower is a script under the doctor? Two scripts on two ranks, in turn with torchrun and with the doctor.

One is lesson 03, the other the short example of the doctor's page, which needs GPUs and so has no time of its own.

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
LESSON = ["train.py", "--epochs", "2", "--limit_train", "6400", "--limit_val", "640", "--num_workers", "0", "--run_dir"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DOCTOR = [sys.executable, "-m", "rankdoctor"]
TORCHRUN_ALONE = "torchrun"
SHORT = "the doctor, a script of 40 lines for GPUs"
WAYS = {
    TORCHRUN_ALONE: ("03_ddp", [*TORCHRUN, *LESSON]),
    "the doctor, whole epochs (`--full`)": ("03_ddp", [*DOCTOR, "--full", "--no_redirect", *LESSON]),
    "the doctor, eight batches of each pass": ("03_ddp", [*DOCTOR, "--no_redirect", *LESSON]),
    SHORT: ("tools/rankdoctor/docs", [*DOCTOR, "example.py"]),
}


def measured(place: str, command: list[str], run_dir: str, data_dir: str) -> float:
    """Return the seconds of a run; the doctor ends with status 1 if it finds a fault."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    words = [*command, run_dir, "--data_dir", data_dir] if "--run_dir" in command else command
    status = subprocess.run(words, cwd=REPOSITORY / place, env=environment, stdout=subprocess.DEVNULL).returncode
    if status not in (0, 1 if "rankdoctor" in command else 0):
        sys.exit(f"error: {' '.join(words)} ended with exit status {status}")
    (REPOSITORY / place / "model.pt").unlink(missing_ok=True)  # of the short script
    return time.monotonic() - began


def main() -> None:
    """Measure all ways in turn, and store the table."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        data = ["data/prepare.py", "mnist", "--synthetic", "--data_dir", f"{folder}/data"]
        subprocess.run([sys.executable, *data], cwd=REPOSITORY, check=True)
        for pair in range(PAIRS):
            for way, (place, command) in WAYS.items():
                run_dir = f"{folder}/{pair}_{way.replace(' ', '_')}"
                found[way].append(measured(place, command, run_dir, f"{folder}/data"))
    rows: list[list[results.Cell]] = []
    for way, seconds in found.items():
        ratios = [mine / others for mine, others in zip(seconds, found[TORCHRUN_ALONE], strict=True)]
        cells = [[statistics.median(each), min(each), max(each)] for each in (seconds, ratios)]
        rows.append([way, cells[0], None if way == SHORT else cells[1]])
    results.store(
        "doctor_overhead",
        title="Two scripts on two ranks with and without the doctor",
        columns=["started by", "seconds", "seconds, of those with torchrun"],
        rows=rows,
        formats={"seconds": ".1f", "seconds, of those with torchrun": ".2f"},
        spread=f"median (lowest to highest) of {PAIRS} runs",
        command="python lab/studies/doctor_overhead.py",
    )


if __name__ == "__main__":
    main()
