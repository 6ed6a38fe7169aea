"""How long does training wait for data? Six steps on a time line, with 0, 1 and 4 processes that load.

    python experiments/loading_timelines.py                            # digits on a slow file system: slow_files.py
    python experiments/loading_timelines.py --slow_files false         # the same without waiting for files

You should see that without workers a step takes the time of loading plus the time of computing. With workers loading
and computing overlap, so that the slower one sets the pace. Four workers can load four batches at a time: then a step
takes little more than its computation. With ``--slow_files false`` loading needs CPU time, which the workers take from
the training if there are only two CPUs.

The configurations are measured alternately, and of each the run that other work disturbed least is plotted. Flags that
are not listed here are passed to train.py.
"""

import argparse
import sys
from pathlib import Path

from lab.flags import Parser, make_output_folder, require_positive
from lab.results import write_results
from lab.tables import format_table
from lab.timelines import quietest_runs
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device
from workshop.profiling.timeline import read_rows

LESSON = Path(__file__).resolve().parent.parent
WORKERS = (0, 1, 4)
STEPS = 40
"""of each run; six of the first 18 are traced, while the workers still have batches to prepare"""
DIGITS = ("--dataset", "mnist", "--model", "mnist_cnn")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for train.py."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=64, help="samples per step (default: %(default)s)")
    parser.add_switch("--slow_files", "let each sample arrive 2 ms late (default: %(default)s)", default=True)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternately (default: %(default)s)")
    parser.add_out("loading_timelines.json and loading_timelines.png")
    arguments, train_flags = parser.parse_known_args()
    require_positive(arguments, "batch_size", "rounds")
    return arguments, train_flags


def figures_of(file: Path) -> dict[str, float]:
    """Return what one step of a trace took, and how long the training process waited for its data, in milliseconds.

    With a GPU a step lasts from one forward pass on the GPU to the next, because the CPU may be several steps ahead.
    """
    rows = read_rows(file)
    (data,) = rows["data"]
    (starts,) = rows["forward"] if "forward launches" in rows else rows["data"]
    steps = len(data) - 1  # from the first wait to the last
    return {
        "step_milliseconds": (starts[-1][0] - starts[0][0]) / (len(starts) - 1),
        "data_milliseconds": sum(length for _, length in data[:-1]) / steps,
    }


def main() -> None:
    """Trace all numbers of workers alternately; plot, print and save the least disturbed run of each."""
    arguments, train_flags = parse_arguments()
    make_output_folder(arguments.out)
    flags = [*DIGITS, "--batch_size", arguments.batch_size, "--limit_train", STEPS * arguments.batch_size]
    flags += ["--limit_val", arguments.batch_size, *train_flags]
    configurations = {f"--num_workers {workers}": [*flags, "--num_workers", workers] for workers in WORKERS}
    plot = arguments.out / "loading_timelines.png"
    best = quietest_runs(
        [sys.executable, "experiments/slow_files.py" if arguments.slow_files else "train.py"],
        LESSON,
        configurations,
        arguments.rounds,
        figures_of,
        "step_milliseconds",
        plot,
        caption="{:.0f} ms per step",
    )
    rows = [{"num_workers": workers, **found} for workers, found in zip(WORKERS, best.values(), strict=True)]
    header = ["--num_workers", "ms a step", "of it waiting for data"]
    cells = [(str(r["num_workers"]), f"{r['step_milliseconds']:.1f}", f"{r['data_milliseconds']:.1f}") for r in rows]
    print(format_table(header, cells))
    facts = {"rounds": arguments.rounds, "batch_size": arguments.batch_size, "slow_files": arguments.slow_files}
    results = {**facts, "rows": rows}
    write_results(arguments.out / "loading_timelines.json", pick_device(), results)


if __name__ == "__main__":
    run_reporting_user_errors(main)
