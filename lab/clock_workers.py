"""Where is the bottleneck of the 3-D U-Net on a simulated A100, with 0 to 4 workers, and with data on the GPU?

    python data/prepare.py nbody --synthetic --cells 128
    python lab/clock_workers.py          # some minutes

Each run trains lesson 04's script, unchanged, on batches of 64 cubes. The loader is real, on this machine's CPUs: more
workers than CPUs cannot help here. NERSC's measured ladder had 64 CPU cores beside the A100.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402

BATCH = 64
MEASURED = {"2": 86.5, "4": 163.2, "8": 274.2, "16": 253.5}
"""samples/s by the number of workers: NERSC, Deep Learning at Scale, log of its README (A100 with 40 GB, TF32)"""
SETTINGS = [*(("map", number) for number in ("0", "1", "2", "4")), ("device", "0")]


def simulated(loader: str, workers: str) -> tuple[float, float, str]:
    """Return samples/s, the share of the time in which the GPU is busy, and what it waits for."""
    command = [sys.executable, "../nullgpu/run.py", "--beside_gpu", "--clock", "a100", "python", "train.py"]
    flags = f"--config ../configs/unet3d.yaml --loader {loader} --num_workers {workers} --epochs 1"
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *command,
            *flags.split(),
            "--precision",
            "tf32",
            "--train_crops",
            "960",
            "--val_crops",
            "64",
            "--run_dir",
            folder,
        ]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            words, cwd=REPOSITORY / "04_mixed_precision", env=environment, capture_output=True, text=True, timeout=900
        )
    found = re.search(r"([\d.]+) ms each, GPU busy (\d+)%", done.stdout)
    if not found:
        raise SystemExit(f"{loader}, {workers} workers: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    waits = re.search(r"it waits for (.*)", done.stdout)
    return BATCH / (float(found[1]) / 1e3), int(found[2]) / 100, waits[1] if waits else ""


def main() -> None:
    """Run all settings, and store the table."""
    rows: list[list[results.Cell]] = []
    for loader, workers in SETTINGS:
        speed, busy, waits = simulated(loader, workers)
        measured = MEASURED.get(workers) if loader == "map" else 395.2  # by DALI, whose data lies on the GPU, too
        rows.append([f"`{loader}`", workers, speed, busy, waits, measured])
        print(*rows[-1], sep=" | ", flush=True)
    results.store(
        "clock_workers",
        title="The 3-D U-Net on a simulated A100, with a loader on this machine's CPUs",
        columns=["--loader", "workers", "simulated", "GPU busy", "it waits for", "NERSC measured"],
        rows=rows,
        formats={"simulated": ",.0f", "NERSC measured": ",.0f", "GPU busy": ".0%"},
        unit="samples/s",
        command="python lab/clock_workers.py",
    )


if __name__ == "__main__":
    main()
