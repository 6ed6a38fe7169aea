"""DataParallel beside DDP on one, two and four simulated GPUs, with one batch of 512 images for all of them.

    python ../data/prepare.py cifar10 --synthetic
    python experiments/simulated_gpus.py             # some minutes, on a machine that does nothing else

The scripts are those of lessons 02 and 03, unchanged, with images that are on the GPU. You should see the milliseconds
of a step, and how many times as fast it is as on one GPU. It needs what the null GPU needs (tools/nullgpu/README.md).
"""

from functools import partial
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.simulated import Simulated, simulate
from lab.timing import alternately
from workshop.errors import run_reporting_user_errors

REPOSITORY = Path(__file__).resolve().parents[2]
GPU, GPUS, BATCH, SKIP, STEPS = "t4", (1, 2, 4), 512, 3, 12
FLAGS = ("--config", "../configs/cifar10.yaml", "--model", "resnet18", "--loader", "device", "--limit_val", 128)


def dataparallel(gpus: int) -> Simulated:
    """Return a step of lesson 02: one process, and a thread for each GPU."""
    flags = (*FLAGS, "--epochs", 1, "--batch_size", BATCH, "--limit_train", BATCH * (SKIP + STEPS))
    return simulate(GPU, "python", "train.py", *flags, folder=REPOSITORY / "02_dataparallel", gpus=gpus, skip=SKIP)


def ddp(gpus: int) -> Simulated:
    """Return a step of lesson 03, as rank 0 of so many: the others count as equally fast."""
    flags = (*FLAGS, "--epochs", 1, "--batch_size", BATCH // gpus, "--limit_train", BATCH * (SKIP + STEPS))
    words = ("python", "train.py", *flags)
    return simulate(GPU, *words, folder=REPOSITORY / "03_ddp", gpus=gpus, world=gpus, skip=SKIP)


def main() -> None:
    """Measure all configurations, and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often all is measured (default: %(default)s)")
    rounds = parser.parse_args().rounds
    ways = {"DataParallel": dataparallel, "DDP": ddp}
    found = alternately({f"{name} {gpus}": partial(way, gpus) for name, way in ways.items() for gpus in GPUS}, rounds)
    # The host's time is real, so the fastest round is the least disturbed one.
    best = {key: min(trials, key=lambda trial: trial.milliseconds) for key, trials in found.items()}
    rows: list[list[results.Cell]] = []
    for gpus in GPUS:
        row: list[results.Cell] = [gpus]
        for name in ways:
            step, alone = best[f"{name} {gpus}"], best[f"{name} 1"]
            row += [step.milliseconds, alone.milliseconds / step.milliseconds, step.busy]
        rows.append(row)
    columns = [f"{name}, {what}" for name in ways for what in ("ms", "times as fast", "GPU 0 busy")]
    results.store(
        "simulated_dataparallel",
        title="DataParallel and DDP on simulated T4s",
        columns=["GPUs", *columns],
        rows=rows,
        formats={c: {"ms": ".1f", "times as fast": ".2f", "GPU 0 busy": ".0%"}[c.split(", ")[1]] for c in columns},
        unit=f"a step of ResNet-18 on {BATCH} images of 32x32 in fp32, shared by GPUs that are connected over PCIe",
        spread=f"the fastest of {rounds} rounds",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
