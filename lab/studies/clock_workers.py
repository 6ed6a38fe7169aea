"""Where is the bottleneck of the 3-D U-Net on a simulated A100, with 0 to 16 workers, and with data on the GPU?

    python data/prepare.py nbody --synthetic --cells 128
    python lab/studies/clock_workers.py          # some minutes

Each run trains lesson 04's script, unchanged. The loader is real, on this machine's CPUs: so more workers
than CPUs gain less here than on NERSC's machine, which had 64 CPU cores beside the A100. NERSC's batches have 64 cubes,
these have 32, because 16 workers with 64 each need more than 24 GiB.
"""

import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.simulated import simulate  # noqa: E402
from workshop.errors import run_reporting_user_errors  # noqa: E402

LESSON = REPOSITORY / "04_mixed_precision"
BATCH = 32
MEASURED = {"2": 86.5, "4": 163.2, "8": 274.2, "16": 253.5}
"""samples/s by the number of workers: NERSC, Deep Learning at Scale, log of its README (A100 with 40 GB, TF32)"""
SETTINGS = [*(("map", number) for number in ("0", "1", "2", "4", "8", "16")), ("device", "0")]
FLAGS = [
    "--config",
    "../configs/unet3d.yaml",
    "--global_batch_size",
    BATCH,
    "--precision",
    "tf32",
    "--epochs",
    1,
    "--val_crops",
    64,
]


def main() -> None:
    """Run all settings, and store the table."""
    rows: list[list[results.Cell]] = []
    for loader, workers in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            # Workers load two batches each before the first update, which do not count. After that they deliver one
            # batch each at nearly the same time, so count whole rounds of them, up to the last batch.
            skipped, counted = max(4, 3 * int(workers)), max(16, 2 * int(workers))
            flags = [
                *FLAGS,
                "--train_crops",
                BATCH * (skipped + counted),
                "--loader",
                loader,
                "--num_workers",
                workers,
                "--run_dir",
                folder,
            ]
            found = simulate("a100", "python", "train.py", *flags, folder=LESSON, skip=skipped)
        measured = MEASURED.get(workers) if loader == "map" else 395.2  # by DALI, whose data lies on the GPU, too
        rows.append(
            [
                f"`{loader}`",
                workers,
                BATCH / (found.milliseconds / 1e3),
                found.busy,
                found.waits_in_words,
                measured,
                found.minute,
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    results.store(
        "clock_workers",
        title="The 3-D U-Net on a simulated A100, with a loader on this machine's CPUs",
        columns=[
            "--loader",
            "workers",
            "simulated",
            "GPU busy",
            "it waits for",
            "NERSC measured",
            "s for a simulated minute",
        ],
        rows=rows,
        formats={"simulated": ",.0f", "NERSC measured": ",.0f", "s for a simulated minute": ".0f", "GPU busy": ".0%"},
        unit="samples/s",
        command="python lab/studies/clock_workers.py",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
