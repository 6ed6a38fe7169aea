"""When are gradients sent? DDP's all-reduces during backward, with one bucket, PyTorch's default, and many buckets.

    python experiments/bucket_timelines.py               # two ranks on this machine; ResNet-18 has 45 MB of gradients

You should see that a single bucket is sent only when the last gradient is ready, so that the ranks wait for all of the
communication. Of several buckets, all but the last one are sent while backward is still running. The configurations are
measured alternately, and of each the run that other work disturbed least is plotted.
"""

import argparse
from pathlib import Path

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import torchrun
from lab.results import write_results
from lab.tables import format_table
from lab.timelines import quietest_runs
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device
from workshop.profiling.timeline import read_rows

LESSON = Path(__file__).resolve().parent.parent
TITLES = {
    ("--bucket_cap_mb", "100"): "one bucket: --bucket_cap_mb 100",
    (): "PyTorch's default: 1 MiB, then 25 MiB",
    ("--bucket_cap_mb", "1"): "many buckets: --bucket_cap_mb 1",
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=16, help="samples per rank (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of each run; the last six count (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternately (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="any classifier (default: %(default)s)")
    parser.add_out("bucket_timelines.json and bucket_timelines.png")
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size", "rounds", "steps")
    return arguments


def figures_of(file: Path) -> dict[str, float]:
    """Return the buckets of a trace, and the milliseconds that backward took in a step; if there is a GPU, there."""
    rows = read_rows(file)
    (backward,) = rows["backward"]
    return {
        "buckets": len(rows["all-reduces"]),
        "backward_milliseconds": sum(length for _, length in backward) / len(backward),
    }


def main() -> None:
    """Trace all configurations alternately; plot, print and save the least disturbed run of each."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    samples = 2 * arguments.batch_size
    flags = ["--loader", "memory", "--num_workers", 0, "--model", arguments.model, "--optimizer", "sgd"]
    flags += ["--batch_size", arguments.batch_size, "--limit_train", arguments.steps * samples, "--limit_val", samples]
    configurations = {title: [*flags, *caps] for caps, title in TITLES.items()}
    plot = arguments.out / "bucket_timelines.png"
    best = quietest_runs(
        [*torchrun(2), "train.py"], LESSON, configurations, arguments.rounds, figures_of, "backward_milliseconds", plot
    )
    rows = [{"setting": title, **found} for title, found in best.items()]
    cells = [(row["setting"], str(row["buckets"]), f"{row['backward_milliseconds']:.1f}") for row in rows]
    print(format_table(["", "buckets", "ms of backward"], cells))
    results = {"rounds": arguments.rounds, "batch_size": arguments.batch_size, "model": arguments.model, "rows": rows}
    write_results(arguments.out / "bucket_timelines.json", pick_device(), results)


if __name__ == "__main__":
    run_reporting_user_errors(main)
