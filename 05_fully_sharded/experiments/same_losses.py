"""Does sharding change what a model learns? Lesson 04 (DDP) and lesson 05 (FSDP2) train the same vision transformer.

    python experiments/same_losses.py                     # 1, 2 and 4 ranks on this machine's CPUs: about two minutes
    python experiments/same_losses.py --ranks 1,2 --limit_train 640       # fewer samples

All runs have the same seed and the same global batch size, so every step has the same samples however many ranks share
it. You should see losses that differ only by rounding, because sums are taken in another order.
"""

import argparse

from lab import results
from lab.flags import Parser
from lab.launching import train
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors
from workshop.paths import REPOSITORY

LESSONS = {"04, DDP": "04_mixed_precision", "05, FSDP2": "05_fully_sharded"}
FLAGS = ("--model", "vit", "--precision", "fp32", "--global_batch_size", 64, "--num_workers", 0)
FLAGS += ("--limit_val", 320, "--log_interval", 1000)


def rank_counts(text: str) -> list[int]:
    """Read numbers of ranks, with commas between them."""
    if not all(word.isdecimal() and 1 <= int(word) <= 64 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"takes numbers from 1 to 64 with commas between them, got {text}")
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Train all runs and store their losses."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=rank_counts, default=[1, 2, 4], help="with commas (default: 1,2,4)")
    parser.add_argument("--limit_train", type=int, default=2560, help="samples in the epoch (default: 2560)")
    arguments = parser.parse_args()
    require_positive(arguments, "limit_train")
    flags = (*FLAGS, "--limit_train", arguments.limit_train)
    rows: list[list[results.Cell]] = []
    for ranks in arguments.ranks:
        for name, lesson in LESSONS.items():
            summary = train(REPOSITORY / lesson, *flags, ranks=ranks, on_cpu=True, threads=1, quiet=True)
            (epoch,) = summary["epochs"]
            rows.append([name, ranks, epoch["train_loss"], epoch["val_loss"], epoch["val_accuracy"]])
    samples = f"one epoch of {arguments.limit_train:,} samples in steps of 64, however many ranks share them"
    results.store(
        "same_losses",
        title="Losses by number of ranks",
        columns=["lesson", "ranks", "train loss", "validation loss", "accuracy"],
        rows=rows,
        formats={"train loss": ",.7f", "validation loss": ",.7f", "accuracy": ".2%"},
        spread=samples,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
