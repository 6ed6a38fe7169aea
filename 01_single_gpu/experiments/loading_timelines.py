"""How long does training wait for data? Six steps on a time line, with 0, 1 and 4 processes that load.

    python experiments/loading_timelines.py

You should see that without workers a step takes the time of loading plus the time of computing. With workers loading
and computing overlap, so that the slower one sets the pace. Four workers can load four batches at a time: then a step
takes little more than its computation. The digits come from a slow file system (slow_files.py), so that loading is
mostly waiting. Of each configuration, the run that other work disturbed least is plotted.
"""

from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.plots import quietest_traces
from workshop.errors import run_reporting_user_errors
from workshop.profiling.timeline import read_rows

LESSON = Path(__file__).resolve().parent.parent
WORKERS = (0, 1, 4)
BATCH, STEPS = 64, 40
"""samples per step, and steps of a run: six of the first 18 are traced, while workers still have batches to prepare"""


def figures_of(trace: Path) -> dict[str, float]:
    """Return what one step of a trace took, and how long the training process waited for its data, in milliseconds."""
    rows = read_rows(trace)
    (data,) = rows["data"]
    (starts,) = rows["forward"] if "forward launches" in rows else rows["data"]  # the CPU may be ahead of a GPU
    return {
        "step": (starts[-1][0] - starts[0][0]) / (len(starts) - 1),
        "data": sum(length for _, length in data[:-1]) / (len(data) - 1),
    }


def main() -> None:
    """Trace all numbers of workers alternately; store and plot the least disturbed run of each."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternately (default: %(default)s)")
    rounds = parser.parse_args().rounds
    flags = ("--batch_size", BATCH, "--limit_train", STEPS * BATCH, "--limit_val", BATCH)
    configurations = {f"--num_workers {workers}": (*flags, "--num_workers", workers) for workers in WORKERS}
    script = "experiments/slow_files.py"
    figure, best = quietest_traces(LESSON, configurations, rounds, figures_of, "step", script=script, quiet=True)
    results.store(
        "loading_timelines",
        title="Six training steps with slow files",
        columns=["workers", "a step, ms", "data, ms"],
        rows=[[str(n), one["step"], one["data"]] for n, one in zip(WORKERS, best.values(), strict=True)],
        formats={"a step, ms": ".0f", "data, ms": ".0f"},
        spread="one run of each",
        figure=figure,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
