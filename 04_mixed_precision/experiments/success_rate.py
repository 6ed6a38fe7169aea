"""How often, and how soon, does MNIST with everything on reach 98 %? Many seeds, beside lesson 01's script.

    python experiments/success_rate.py --seeds 1 --limit_train 640 --limit_val 200       # to see how it works
    python experiments/success_rate.py                                                   # the study

One seed is an anecdote: the next one may miss the target. So mnist_fast.yaml trains with many seeds. With some of them
train lesson 01's script, and mnist_fast.yaml with one change taken back. All take turns, so that other work on the
machine slows all alike. Seconds are those of whole processes, from the start of Python to its end. You should see a
table with the seeds that reached the target. Flags that are not listed here go to all runs of train.py.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import check_flags, run_and_read
from lab.results import write_results
from lab.tables import format_table
from lab.timing import cpu_share
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import emulates, pick_device
from workshop.paths import REPOSITORY

TARGET = 0.98
BASELINE = ["--config", "../configs/mnist.yaml"]
FAST = [*BASELINE, "--config", "../configs/mnist_fast.yaml"]
FP32, DROPOUT = ["--precision", "fp32"], ["--dropout", "true"]


@dataclass(frozen=True)
class Outcome:
    """What training with one seed gave and took."""

    seed: int
    val_accuracy: float
    samples_per_second: float
    training_seconds: float
    process_seconds: float
    """from the start of Python to its end"""
    cpu_seconds: float
    """of the whole process and those it started, summed over the CPUs"""


@dataclass
class Contender:
    """A script with a configuration, and its runs so far."""

    name: str
    lesson: str
    flags: list[str]
    runs: list[Outcome] = field(default_factory=list)

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        return sum(run.val_accuracy >= TARGET for run in self.runs)

    def median(self, figure: str) -> float:
        """Return the median of a figure over the runs."""
        return statistics.median(getattr(run, figure) for run in self.runs)

    def train(self, seed: int, flags: list[str], out: Path) -> None:
        """Train in a process of its own.

        Raises:
            UserError: it failed.
        """
        command = [sys.executable, "train.py", *self.flags, *flags, "--seed", seed]
        cpu_before, started = cpu_seconds(), time.perf_counter()
        summary = run_and_read(command, REPOSITORY / self.lesson, flag="--run_dir", out=out)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu_before
        last = summary["epochs"][-1]
        training = sum(epoch["seconds"] for epoch in summary["epochs"])
        self.runs.append(Outcome(seed, last["val_accuracy"], last["samples_per_second"], training, seconds, cpu))
        print(f"{self.name}, seed {seed}: {last['val_accuracy']:.2%}, {seconds:.1f} s", flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of all processes that were started from here and have ended, and of those they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: the flags of this script, and those for train.py.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="of mnist_fast.yaml (default: %(default)s)")
    parser.add_argument("--first_seed", type=int, default=1, help="the others follow it (default: %(default)s)")
    parser.add_argument(
        "--seeds_of_others", type=int, default=5, help="how many of them all else trains with (default: %(default)s)"
    )
    parser.add_out("success_rate.json")
    arguments, train_flags = parser.parse_known_args()
    require_positive(arguments, "seeds", "first_seed", "seeds_of_others")
    if any(flag.partition("=")[0] == "--seed" for flag in train_flags):
        raise UserError("--seed is what this experiment varies; choose them with --first_seed and --seeds")
    return arguments, train_flags


def contenders(emulated: bool) -> list[Contender]:
    """Return what is compared: lesson 01, then the fast configuration, then it with one change taken back.

    A CPU that only emulates bf16, many times slower, computes in fp32 throughout.
    """
    fast = [*FAST, *FP32] if emulated else FAST
    found = [
        Contender("standard", "01_single_gpu", BASELINE),
        Contender("fast", "04_mixed_precision", fast),
        Contender("dropout", "04_mixed_precision", [*fast, *DROPOUT]),
    ]
    return found if emulated else [*found, Contender("fp32", "04_mixed_precision", [*fast, *FP32])]


def table(rows: list[Contender]) -> str:
    """Return the table that the user sees."""
    header = ["", f"reached {TARGET:.0%}", "lowest", "median", "process s", "of it training", "CPU s"]
    cells = []
    for row in rows:
        lowest = min(run.val_accuracy for run in row.runs)
        seconds = (f"{row.median(figure):.1f}" for figure in ("process_seconds", "training_seconds", "cpu_seconds"))
        reached = f"{row.reached} of {len(row.runs)}"
        cells.append([row.name, reached, f"{lowest:.2%}", f"{row.median('val_accuracy'):.2%}", *seconds])
    return format_table(header, cells)


def main() -> None:
    """Train with all configurations in turn; print the table and write the results file."""
    arguments, flags = parse_arguments()
    device = pick_device()
    rows = contenders(emulated=emulates(device, "bf16"))
    for row in rows:
        check_flags(REPOSITORY / row.lesson, flags)
    make_output_folder(arguments.out)
    file = arguments.out / "success_rate.json"
    of_others, shares = min(arguments.seeds_of_others, arguments.seeds), []
    for number in range(arguments.seeds):
        shares.append(cpu_share())  # on a machine that others use, not all of the seconds are ours
        turn_of_all = number * of_others // arguments.seeds == len(rows[0].runs)  # evenly spread over the seeds
        for row in rows:
            if turn_of_all or row.name == "fast":
                row.train(arguments.first_seed + number, flags, arguments.out)
        figures = {"target": TARGET, "train_flags": flags, "cpu_share": statistics.median(shares)}
        write_results(file, device, figures | {"rows": [asdict(row) for row in rows]})  # if stopped now, it keeps them

    standard, fast, *_ = rows
    part = fast.median("process_seconds") / standard.median("process_seconds")
    print(f"\n{table(rows)}\n")
    print(f"=> {fast.reached} of {arguments.seeds} seeds reached {TARGET:.0%}, in {part:.2f} of the standard's time")
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
