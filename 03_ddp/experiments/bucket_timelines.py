"""When are gradients sent? DDP's all-reduces during backward, with one bucket, PyTorch's default, and many buckets.

    python experiments/bucket_timelines.py               # two ranks on CPUs; ResNet-18 has 45 MB of gradients

You should see that a single bucket is sent only when the last gradient is ready, so that the ranks wait for all of the
communication. Of several buckets, all but the last one are sent while backward is still running. Of each configuration,
the run that other work disturbed least is plotted.
"""

from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.plots import quietest_traces
from workshop.errors import run_reporting_user_errors
from workshop.profiling.timeline import read_rows

LESSON = Path(__file__).resolve().parents[1]
TITLES: dict[str, tuple[object, ...]] = {
    "one bucket: --bucket_cap_mb 100": ("--bucket_cap_mb", 100),
    "PyTorch's default: 1 MiB, then 25 MiB": (),
    "many buckets: --bucket_cap_mb 1": ("--bucket_cap_mb", 1),
}


def figures_of(trace: Path) -> dict[str, float]:
    """Return the buckets of a trace, and the milliseconds that backward took in a step."""
    rows = read_rows(trace)
    (backward,) = rows["backward"]
    return {"buckets": len(rows["all-reduces"]), "backward": sum(length for _, length in backward) / len(backward)}


def main() -> None:
    """Trace all configurations alternately; store and plot the least disturbed run of each."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternately (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="any classifier (default: %(default)s)")
    arguments = parser.parse_args()
    flags: tuple[object, ...]
    flags = ("--config", "../configs/cifar10.yaml", "--loader", "memory", "--num_workers", 0, "--optimizer", "sgd")
    flags += ("--model", arguments.model, "--batch_size", 16, "--limit_train", 640, "--limit_val", 32)
    configurations = {title: (*flags, *caps) for title, caps in TITLES.items()}
    how = {"ranks": 2, "threads": 1, "on_cpu": True, "quiet": True}
    figure, best = quietest_traces(LESSON, configurations, arguments.rounds, figures_of, "backward", **how)
    results.store(
        "bucket_timelines",
        title="Backward by number of buckets",
        columns=["buckets", "backward, ms"],
        rows=[[f"{found['buckets']:.0f}", found["backward"]] for found in best.values()],
        formats={"backward, ms": ".0f"},
        spread="mean over the steps of one run",
        figure=figure,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
