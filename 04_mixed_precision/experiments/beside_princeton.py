"""MNIST to 98 % beside the script of Princeton's workshop, with and without the start of the process.

    git clone https://github.com/PrincetonUniversity/multi_gpu_training
    python experiments/beside_princeton.py --script multi_gpu_training/01_single_gpu/mnist_classify.py

Both train the same network, Princeton's for one epoch. All runs take turns, each in a process of its own, with another
seed in each round. The start is what passes until the end of the first update; on a GPU it takes longer than the
training.
"""

import json
import re
import tempfile
import time
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import PYTHON, run
from lab.timing import median_range
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY, default_data_dir

THEIRS = "Princeton's `mnist_classify.py`"
FAST = ("--config", "../configs/mnist.yaml", "--config", "../configs/mnist_fast.yaml")
OURS = {
    "01: `mnist.yaml`": ("01_single_gpu", FAST[:2]),
    "04: `mnist_fast.yaml`": ("04_mixed_precision", FAST),
    "the same, a CUDA graph": ("04_mixed_precision", (*FAST, "--cuda_graph", "true")),
}
"""lesson and flags; the last one on a GPU only"""
NOTE_START = """
import json, os, runpy, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
out, script, *words = sys.argv[1:]
def stepped(*_):
    hook.remove()
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    with open(out, "w") as file:
        json.dump({"first": time.time(), "gpu": torch.cuda.is_available()}, file)
hook = register_optimizer_step_post_hook(stepped)
sys.argv = [script, *words]
sys.path[0] = os.path.dirname(os.path.abspath(script))
runpy.run_path(script, run_name="__main__")
"""
"""runs a script, and writes when its first update had ended"""


def measured(folder: Path, script: Path, *flags: object) -> tuple[float, float, str]:
    """Run a script; return its seconds, those after its first update, and what it printed."""
    with tempfile.TemporaryDirectory() as scratch:
        noted = Path(scratch, "noted.json")
        began = time.time()
        printed = run([PYTHON, "-c", NOTE_START, noted, script, *flags], folder)
        ended = time.time()
        return ended - began, ended - json.loads(noted.read_text())["first"], printed


def of_princeton(script: Path, seed: int) -> tuple[float, float, float]:
    """Return the seconds, those without the start, and the accuracy of an epoch of Princeton's script."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(default_data_dir())
        whole, training, printed = measured(Path(folder), script, "--epochs", 1, "--seed", seed)
    found = re.search(r"Accuracy: (\d+)/(\d+)", printed)
    if found is None:
        raise UserError(f"{script} prints no accuracy")
    return whole, training, int(found[1]) / int(found[2])


def of_lesson(lesson: str, flags: tuple[str, ...], seed: int) -> tuple[float, float, float]:
    """Return the same of a lesson."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*flags, "--seed", seed, "--run_dir", folder)
        whole, training, _ = measured(REPOSITORY / lesson, REPOSITORY / lesson / "train.py", *words)
        return whole, training, json.loads(Path(folder, "summary.json").read_text())["epochs"][-1]["val_accuracy"]


def main() -> None:
    """Run all in turns; store the table after each round."""
    parser = Parser(__doc__)
    parser.add_argument("--script", type=Path, required=True, help="Princeton's mnist_classify.py")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    arguments = parser.parse_args()
    require_positive(arguments, "rounds")
    script = arguments.script.resolve()
    if not script.is_file():
        raise UserError(f"no file {script}: git clone https://github.com/PrincetonUniversity/multi_gpu_training")
    if not (default_data_dir() / "MNIST").is_dir():
        raise UserError(f"no MNIST in {default_data_dir()}: python data/prepare.py mnist")
    import torch

    ours = OURS if torch.cuda.is_available() else dict(list(OURS.items())[:2])
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (THEIRS, *ours)}
    for seed in range(1, arguments.rounds + 1):
        found[THEIRS].append(of_princeton(script, seed))
        for name, (lesson, flags) in ours.items():
            found[name].append(of_lesson(lesson, flags, seed))
        rows: list[list[results.Cell]] = []
        for name, runs in found.items():
            whole, training, accuracy = zip(*runs, strict=True)
            ratios = [run[1] / other[1] for run, other in zip(runs, found[THEIRS], strict=True)]
            rows.append([name, *map(median_range, (whole, training, ratios, accuracy))])
        results.store(
            "beside_princeton",
            title="MNIST beside Princeton's script, seconds",
            columns=["run", "whole process", "without its start", "ratio", "accuracy"],
            rows=rows,
            formats={"whole process": ".1f", "without its start": ".2f", "ratio": ".3f", "accuracy": ".2%"},
            spread=(
                "one run each"
                if seed == 1
                else "median (lowest to highest) of runs that took turns, each with its seed"
            )
            + "; ratio: of the seconds without the start, to Princeton's in the same round",
            command="python experiments/beside_princeton.py --script mnist_classify.py",
            finished=seed == arguments.rounds,
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
