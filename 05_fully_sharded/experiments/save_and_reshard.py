"""Saved by four ranks, resumed by four, two, three or one; saved by one, resumed by four; and how long a save takes.

    python experiments/save_and_reshard.py            # about three minutes, on CPUs

Each row of the first table should have the losses of the run above it that was not stopped, up to rounding. The second
table compares dcp.save with --async_save true, which copies the parts of the checkpoint, and lets a thread write them.
"""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from lab import results
from lab.flags import Parser
from lab.launching import run, torchrun
from lab.process_group import process_group
from lab.timing import median_range
from sharded_models import LESSON as lesson
from sharded_models import training_of
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors
from workshop.ranks import Ranks

LESSON = Path(__file__).resolve().parents[1]
RESUMED_BY = {4: (4, 2, 3, 1), 1: (4,)}
"""ranks that save a checkpoint: ranks that resume from it; a global batch can be shared evenly by all of them"""
RUN: tuple[object, ...]
RUN = ("--width", 128, "--sequence_length", 64, "--limit_train", 192, "--limit_val", 48, "--global_batch_size", 24)
RUN += ("--epochs", 2, "--num_workers", 0, "--resume", "true")
SAVING = 2
"""ranks whose saves are timed"""


def losses(ranks: int, run_dir: Path) -> list[float]:
    """Train, from the checkpoint in the folder if there is one; return the losses of the last epoch."""
    run([*torchrun(ranks), "train.py", *RUN, "--run_dir", run_dir], LESSON, on_cpu=True, threads=1, quiet=True)
    last = json.loads((run_dir / "summary.json").read_text())["epochs"][-1]
    return [last["train_loss"], last["val_loss"]]


def resume_elsewhere(folder: Path) -> None:
    """Train two epochs with some ranks; train the second one again with as many and with others; store the losses."""
    rows: list[list[results.Cell]] = []
    for saved_by, resumed_by in RESUMED_BY.items():
        saved = folder / str(saved_by)
        expected = losses(saved_by, saved)
        rows.append([f"not stopped, {saved_by} rank{'s' if saved_by > 1 else ''}", *expected, None])
        shutil.rmtree(max((saved / "checkpoints").iterdir()))  # continue from the one before, after the first epoch
        (saved / "summary.json").unlink()
        for ranks in resumed_by:
            found = losses(ranks, shutil.copytree(saved, folder / f"{saved_by}_{ranks}"))
            difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
            rows.append([f"saved by {saved_by}, resumed by {ranks}", *found, difference])
    columns = ["", "train loss", "validation loss", "differs by"]
    results.store(
        "save_and_reshard",
        title="Losses of the second epoch, not stopped and resumed after the first one",
        columns=columns,
        rows=rows,
        formats={"train loss": ",.6f", "validation loss": ",.6f", "differs by": ".0e"},
        spread="the difference is relative",
    )


def measure_saves(file: Path, width: int, depth: int, trials: int) -> None:
    """As one of two ranks: save a model in both ways in turn; write how long training waits, and until all is saved."""
    with process_group(on_cpu=True) as (rank, world_size, device):
        config = lesson.Config(width=width, depth=depth)
        ranks = Ranks(rank=rank, world_size=world_size, device=device)
        model = lesson.shard_model(config, ranks)
        training = training_of(config, model, ranks)
        lesson.train_step(config, training, *torch.zeros(2, 2, 16, dtype=torch.long))
        folder = SimpleNamespace(path=file.parent, settings={})
        seconds: dict[str, list[list[float]]] = {"false": [], "true": []}
        for trial in range(trials + 1):  # the first one warms up
            for number, way in enumerate(seconds):
                config = lesson.Config(width=width, depth=depth, async_save=way == "true")
                log = SimpleNamespace(folder=folder, config=config)
                training.progress = lesson.Progress(step=2 * trial + number)
                dist.barrier()
                started = time.perf_counter()
                lesson.save(training, log)
                waited = time.perf_counter() - started
                lesson.finish_save(training, log)
                dist.barrier()
                if trial:
                    seconds[way].append([waited, time.perf_counter() - started])
        if rank == 0:
            weights = sum(weight.numel() for weight in model.parameters())
            file.write_text(json.dumps({"weights": weights, "seconds": seconds}))


def main() -> None:
    """Measure both and store the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model whose saves are timed (default: 512)")
    parser.add_argument("--depth", type=int, default=6, help="of this model (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=5, help="saves in each way (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="file that a rank which this script starts writes its seconds to")
    arguments = parser.parse_args()
    require_positive(arguments, "width", "depth", "trials")
    width, depth, trials = arguments.width, arguments.depth, arguments.trials
    torch.set_num_threads(1)
    if arguments.write is not None:
        measure_saves(arguments.write, width, depth, trials)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tables are about CPUs
    with tempfile.TemporaryDirectory() as folder:
        resume_elsewhere(Path(folder))
        file = Path(folder, "seconds.json")
        flags = ("--width", width, "--depth", depth, "--trials", trials, "--write", file)
        run([*torchrun(SAVING), Path(__file__).resolve(), *flags], LESSON, on_cpu=True, threads=1, quiet=True)
        found = json.loads(file.read_text())
    rows: list[list[results.Cell]] = []
    for way, of_trials in found["seconds"].items():
        waited, complete = zip(*of_trials, strict=True)
        rows.append([f"`--async_save {way}`", median_range(waited), median_range(complete)])
    columns = ["", "training waits", "until the checkpoint is complete"]
    results.store(
        "saving_seconds",
        title=f"Saving {found['weights'] / 1e6:.1f} million weights and their optimizer state",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[1:], ".2f"),
        unit="seconds",
        spread=f"median of {trials} saves, lowest and highest; {found['weights'] / 1e6:.1f} million weights",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
