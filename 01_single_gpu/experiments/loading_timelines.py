"""Who waits for whom: six steps of train.py on a time line, with 0, 1 and 4 processes that load.

    python experiments/loading_timelines.py                            # CIFAR-10, as configs/cifar10.yaml has it
    python experiments/loading_timelines.py --dataset mnist --model mnist_cnn

You should see the line that waits for data, ``data``, take as long as a batch takes to prepare where nobody prepares
it ahead, and less where workers do. Of several runs of each, all in turn, the one least disturbed by others is drawn.
Flags that are not listed here go to train.py.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import reason
from lab.records import write_record
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device
from workshop.profiling.timeline import plot_traces, read_rows

LESSON = Path(__file__).resolve().parent.parent
WORKERS = (0, 1, 4)
STEPS = 60
"""of each run; six of the first 18 are traced, while workers have more to prepare than they may ahead"""


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for train.py."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=128, help="samples per step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: %(default)s)")
    parser.add_out("loading_timelines.json and loading_timelines.png")
    arguments, train_flags = parser.parse_known_args()
    require_positive(arguments, "batch_size", "rounds")
    return arguments, train_flags


def trace(folder: Path, *flags: object) -> Path:
    """Trace some steps of train.py into ``folder``; return the trace.

    Raises:
        UserError: it failed.
    """
    command = [sys.executable, "train.py", "--config", "../configs/cifar10.yaml", "--epochs", 1, "--trace", "true"]
    words = [*map(str, [*command, *flags, "--run_dir", folder])]
    result = subprocess.run(words, cwd=LESSON, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr))
    return folder / "rank0.pt.trace.json.gz"


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
    """Trace all numbers of workers in turn; draw, print and record the quietest run of each."""
    arguments, train_flags = parse_arguments()
    make_output_folder(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        traces: dict[int, list[Path]] = {workers: [] for workers in WORKERS}
        for number in range(arguments.rounds):
            for workers, found in traces.items():
                flags = ["--batch_size", arguments.batch_size, "--limit_train", STEPS * arguments.batch_size]
                flags += ["--limit_val", arguments.batch_size, *train_flags, "--num_workers", workers]
                found.append(trace(Path(folder, f"{workers}_{number}"), *flags))
        best = {
            workers: min(found, key=lambda file: figures_of(file)["step_milliseconds"])
            for workers, found in traces.items()
        }
        rows = [{"num_workers": workers, **figures_of(file)} for workers, file in best.items()]
        drawn = plot_traces({f"--num_workers {workers}": file for workers, file in best.items()})
        drawn.savefig(arguments.out / "loading_timelines.png")
    header = ["--num_workers", "ms a step", "of it waiting for data"]
    cells = [(str(r["num_workers"]), f"{r['step_milliseconds']:.1f}", f"{r['data_milliseconds']:.1f}") for r in rows]
    print(format_table(header, cells))
    record = {"rounds": arguments.rounds, "batch_size": arguments.batch_size, "rows": rows}
    write_record(arguments.out / "loading_timelines.json", pick_device(), record)


if __name__ == "__main__":
    run_reporting_user_errors(main)
