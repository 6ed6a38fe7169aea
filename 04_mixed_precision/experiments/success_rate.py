"""How often, and how soon, does mnist_fast.yaml reach 98 %? Many seeds, beside lesson 01's script.

    python experiments/success_rate.py                                                        # the study: 10 minutes
    python experiments/success_rate.py --seeds 1 --limit_train 640 --limit_val 200            # to see how it works

One seed is no claim: the next one may miss the target. So mnist_fast.yaml trains with many seeds. With some of them
train lesson 01's script, and mnist_fast.yaml with one change taken back. All take turns, so that other work on the
machine slows all alike. Seconds are those of whole processes, from the start of Python to its end. Flags that are not
listed here go to all runs of train.py.
"""

import time
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import median_range
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors

LESSONS = Path(__file__).resolve().parents[2]
TARGET = 0.98
BASELINE = ("--config", "../configs/mnist.yaml")
FAST = (*BASELINE, "--config", "../configs/mnist_fast.yaml")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "01: `mnist.yaml`": ("01_single_gpu", BASELINE),
    "04: `mnist_fast.yaml`": ("04_mixed_precision", FAST),
    "`--dropout true`": ("04_mixed_precision", (*FAST, "--dropout", "true")),
    "`--precision fp32`": ("04_mixed_precision", (*FAST, "--precision", "fp32")),
}
"""lesson and flags of each row; the last two take back one change of mnist_fast.yaml"""
MANY = "04: `mnist_fast.yaml`"


def store(found: dict[str, list[tuple[float, float]]], finished: bool) -> None:
    """Store the table of all runs so far.

    Args:
        found: validation accuracy and seconds of each run, by row.
        finished: whether these are all.
    """
    rows: list[list[results.Cell]] = []
    for name, runs in found.items():
        accuracies, seconds = zip(*runs, strict=True)
        reached = sum(accuracy >= TARGET for accuracy in accuracies)
        rows.append([name, f"{reached}/{len(runs)}", median_range(accuracies), median_range(seconds)])
    results.store(
        "success_rate",
        title=f"Runs that reach {TARGET:.0%}",
        columns=["run", "seeds at 98%", "accuracy", "seconds"],
        rows=rows,
        formats={"accuracy": ".2%", "seconds": ".1f"},
        spread="median, lowest and highest of runs that took turns; seconds of whole processes",
        finished=finished,
    )


def main() -> None:
    """Train with all configurations in turn; store the table after each seed."""
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="of mnist_fast.yaml (default: %(default)s)")
    parser.add_argument("--seeds_of_others", type=int, default=3, help="of all else (default: %(default)s)")
    arguments, more = parser.parse_known_args()
    require_positive(arguments, "seeds", "seeds_of_others")
    if any(flag.partition("=")[0] == "--seed" for flag in more):
        raise UserError("--seed is what this experiment varies; choose how many with --seeds")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    for seed in range(1, arguments.seeds + 1):
        for name, (lesson, flags) in RUNS.items():
            if name == MANY or seed <= arguments.seeds_of_others:
                started = time.perf_counter()
                last = train(LESSONS / lesson, *flags, *more, "--seed", seed)["epochs"][-1]
                found[name].append((last["val_accuracy"], time.perf_counter() - started))
        store(found, finished=seed == arguments.seeds)


if __name__ == "__main__":
    run_reporting_user_errors(main)
