"""Does a large batch still learn as well? The same data, once per overlay, and their loss curves side by side.

    python experiments/convergence.py --limit_train 4000           # under a minute on two CPUs, to see how it works
    python experiments/convergence.py                              # the study: 10,000 images, one or two minutes
    python experiments/convergence.py --ranks 2                    # each run on two ranks of this machine
    python experiments/convergence.py --train false                # reads the runs that are there: table and plot

You should see that with eight times the batch and nothing else changed, a run learns much less in the same number of
epochs. A higher learning rate alone does not fix that; together with a longer schedule it does. The overlays are in
configs/; name your own with --overlay. All flags of train.py can be given too, and win over the overlays.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from convergence_curves import conclude, curves_table, plot, read_curves, target_of
from lab.flags import Parser, make_output_folder
from lab.launching import torchrun
from lab.results import write_results
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device
from workshop.paths import REPOSITORY

TRAIN = Path(os.path.relpath(REPOSITORY / "03_ddp" / "train.py"))
CONFIGS = Path(os.path.relpath(REPOSITORY / "configs"))
COMMON = [CONFIGS / "cifar10.yaml", CONFIGS / "cifar10_convergence.yaml"]
OVERLAYS = [CONFIGS / f"cifar10_{name}.yaml" for name in ("b64", "b512_naive", "b512_sqrt", "b512_sqrt_long")]


def names(files: list[Path]) -> str:
    """Return the names of files, for the user to read."""
    return ", ".join(file.name for file in files)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: the flags of this script, and those for train.py.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help=f"what all runs share; may be given more than once (default: {names(COMMON)})",
    )
    parser.add_argument(
        "--overlay",
        type=Path,
        action="append",
        metavar="FILE",
        help=f"what one run adds to that; the first is the baseline of the others (default: {names(OVERLAYS)})",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that torchrun starts for each run")
    parser.add_switch("--train", "false: read the runs that are there", default=True)
    parser.add_out("the runs, convergence.json and convergence.png")
    arguments, train_flags = parser.parse_known_args()
    arguments.config = arguments.config or COMMON
    arguments.overlay = arguments.overlay or OVERLAYS
    if len({file.stem for file in arguments.overlay}) < len(arguments.overlay):
        raise UserError(f"--overlay: the runs are named after them, and two of {names(arguments.overlay)} are alike")
    if missing := next((file for file in (*arguments.config, *arguments.overlay) if not file.is_file()), None):
        raise UserError(f"there is no config file {missing}; those of the workshop are in {CONFIGS}")
    if arguments.ranks < 1:
        raise UserError(f"--ranks must be at least 1, got {arguments.ranks}")
    if train_flags and not arguments.train:
        raise UserError(f"--train false trains nothing, so '{shlex.join(train_flags)}' would have no effect")
    return arguments, train_flags


def train(overlay: Path, arguments: argparse.Namespace, train_flags: list[str]) -> None:
    """Train with one overlay, in a process of its own; if that fails, it has said why: leave with its status."""
    start = [sys.executable] if arguments.ranks == 1 else torchrun(arguments.ranks)
    configs = [word for file in (*arguments.config, overlay) for word in ("--config", str(file))]
    flags = [*configs, *train_flags, "--run_dir", str(arguments.out / overlay.stem)]
    shown = ["python"] if arguments.ranks == 1 else ["torchrun", *start[3:]]
    print("\n$", shlex.join([*shown, str(TRAIN), *flags]), flush=True)
    if status := subprocess.run([*start, str(TRAIN), *flags]).returncode:
        sys.exit(status)


def main() -> None:
    """Train once per overlay; then compare the curves in a table, a results file and a plot."""
    arguments, train_flags = parse_arguments()
    make_output_folder(arguments.out)
    if arguments.train:
        for overlay in arguments.overlay:
            train(overlay, arguments, train_flags)

    folders = [arguments.out / overlay.stem for overlay in arguments.overlay]
    curves = read_curves(folders)
    target = target_of(curves)
    print(f"\n{curves_table(curves)}\n")
    for conclusion in conclude(curves):
        print(f"=> {conclusion}")

    summary = json.loads((folders[0] / "summary.json").read_text())
    figures = {
        "hardware": summary["hardware"],
        "versions": summary["versions"],
        "conclusions": conclude(curves),
        "target_val_loss": target,
        "curves": [asdict(curve) | {"epoch_at_target": curve.epoch_at(target)} for curve in curves],
    }
    json_file, plot_file = arguments.out / "convergence.json", arguments.out / "convergence.png"
    write_results(json_file, pick_device(), figures)
    plot(curves, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}\nin TensorBoard: tensorboard --logdir {arguments.out}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
