"""The losses that the exercises of lessons 01 to 03 end with: `python experiments/exercise_losses.py`."""

from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from workshop.errors import run_reporting_user_errors

LESSONS = Path(__file__).resolve().parents[2]
ONE, TWO, THREE = "01_single_gpu", "02_dataparallel", "03_ddp"
FEW = ("--limit_train", 6400)
SHARED = ("--limit_train", 3200, "--global_batch_size", 64)
RUNS: dict[str, tuple[str, int | None, tuple[object, ...]]] = {
    "seed 1": (ONE, None, FEW),
    "seed 2": (ONE, None, (*FEW, "--seed", 2)),
    "batch 128": (TWO, None, (*FEW, "--batch_size", 128)),
    "batch 256": (TWO, None, (*FEW, "--batch_size", 256)),
    "sgd": (TWO, None, (*FEW, "--optimizer", "sgd", "--lr", 0.01)),
    "adamw": (TWO, None, (*FEW, "--optimizer", "adamw")),
    "adadelta": (TWO, None, (*FEW, "--optimizer", "adadelta", "--lr", 1.0)),
    "1 rank": (THREE, None, SHARED),
    "2 ranks": (THREE, 2, SHARED),
}
"""lesson, ranks and flags"""


def main() -> None:
    """Train all of them."""
    Parser(__doc__).parse_args()
    rows: list[list[results.Cell]] = []
    for name, (lesson, ranks, flags) in RUNS.items():
        epoch = train(LESSONS / lesson, *flags, ranks=ranks, on_cpu=True)["epochs"][-1]
        rows.append([name, epoch["val_loss"], epoch["val_accuracy"]])
    results.store(
        "exercises",
        title="What the exercises of lessons 01 to 03 change",
        columns=["run", "validation loss", "accuracy"],
        rows=rows,
        formats={"validation loss": ".3f", "accuracy": ".1%"},
        spread="one run each",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
