"""When gradients travel: DDP's all-reduces during backward, with one bucket, PyTorch's default, and many.

    python experiments/bucket_timelines.py               # two ranks on this machine; ResNet-18 has 45 MB of gradients

You should see one bucket leave when backward is done, so that all ranks wait for it; several of them leave during
backward, and only the last one is waited for. Of several runs of each, all in turn, the one least disturbed by others
is drawn.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import reason, torchrun
from lab.records import write_record
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device
from workshop.profiling.timeline import plot_traces, read_rows

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
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="any classifier (default: %(default)s)")
    parser.add_out("bucket_timelines.json and bucket_timelines.png")
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size", "rounds", "steps")
    return arguments


def trace(folder: Path, arguments: argparse.Namespace, caps: tuple[str, ...]) -> Path:
    """Trace two ranks into ``folder``; return the trace of the first.

    Raises:
        UserError: they failed.
    """
    samples = 2 * arguments.batch_size
    flags = ["--config", "../configs/cifar10.yaml", "--epochs", 1, "--loader", "memory", "--num_workers", 0]
    flags += ["--model", arguments.model, "--batch_size", arguments.batch_size, "--optimizer", "sgd", *caps]
    flags += ["--limit_train", arguments.steps * samples, "--limit_val", samples, "--trace", "true"]
    command = [*torchrun(2), "train.py", *map(str, flags), "--run_dir", str(folder)]
    result = subprocess.run(command, cwd=LESSON, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr))
    return folder / "rank0.pt.trace.json.gz"


def figures_of(file: Path) -> dict[str, float]:
    """Return the buckets of a trace, and the milliseconds that backward took in a step; if there is a GPU, there."""
    rows = read_rows(file)
    (backward,) = rows["backward"]
    return {
        "buckets": len(rows["all-reduces"]),
        "backward_milliseconds": sum(length for _, length in backward) / len(backward),
    }


def main() -> None:
    """Trace all settings in turn; draw, print and record the quietest run of each."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        traces: dict[str, list[Path]] = {title: [] for title in TITLES.values()}
        for number in range(arguments.rounds):
            for place, (caps, title) in enumerate(TITLES.items()):
                traces[title].append(trace(Path(folder, f"{place}_{number}"), arguments, caps))
        best = {
            title: min(found, key=lambda file: figures_of(file)["backward_milliseconds"])
            for title, found in traces.items()
        }
        rows = [{"setting": title, **figures_of(file)} for title, file in best.items()]
        plot_traces(best).savefig(arguments.out / "bucket_timelines.png")
    cells = [(row["setting"], str(row["buckets"]), f"{row['backward_milliseconds']:.1f}") for row in rows]
    print(format_table(["", "buckets", "ms of backward"], cells))
    record = {"rounds": arguments.rounds, "batch_size": arguments.batch_size, "model": arguments.model, "rows": rows}
    write_record(arguments.out / "bucket_timelines.json", pick_device(), record)


if __name__ == "__main__":
    run_reporting_user_errors(main)
