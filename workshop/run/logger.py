"""What a run leaves in its folder: log lines, TensorBoard curves, summary.json."""

import dataclasses
import fcntl
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from workshop.config import TrainConfig
from workshop.errors import UserError, warn
from workshop.hardware import describe_hardware, describe_versions, peak_memory_bytes
from workshop.paths import default_runs_dir, lesson_name, write_json
from workshop.run.control_group import backend_in_use

LOCK = "workshop_run.lock"
"""locked by the run that writes to its folder; not empty if the files with the names below were written by runs"""
WRITTEN = (
    *("summary.json", "summary.tmp", "throughput.json", "events.out.tfevents.*", "rank*.pt.trace.json.gz"),
    *("checkpoint.pt", "checkpoint.previous.pt", "checkpoint.damaged", "checkpoint.tmp", "trace.png"),
    *("checkpoint.sharded", "checkpoint.*.sharded"),  # folders
)


def run_directory(config: TrainConfig) -> Path:
    """Return ``--run_dir``, otherwise lesson and run name under the runs folder.

    A job that Slurm requeues must find its checkpoint again. So the run name is the job id, never a date; outside Slurm
    it is the name of the data set.
    """
    return config.run_dir or default_runs_dir() / lesson_name() / os.environ.get("SLURM_JOB_ID", config.dataset)


def claim(config: TrainConfig, folder: Path) -> TextIO:
    """Make the run folder and return a file that keeps other runs out of it until it is closed or the process ends.

    What earlier runs have written there is removed, unless this run resumes or measures.

    Raises UserError: another run writes there, or there are files that this run would overwrite, and no run wrote them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike that of flock, workers do not inherit this lock
    except BlockingIOError:
        raise UserError(f"another run writes to {folder}; choose another --run_dir") from None
    except OSError:  # a file system without locks
        pass
    found = [file for pattern in WRITTEN for file in folder.glob(pattern)]
    known = lock.tell() > 0
    if not known and not found:
        lock.write("The files of runs in this folder are replaced by the next run.\n")
        lock.flush()
    elif not known and not (config.resume and any(file.name.startswith("checkpoint") for file in found)):
        raise UserError(f"no run is known to have written {found[0]}; move it away, or choose another --run_dir")
    elif not (config.resume or config.benchmark):
        for file in found:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
    return lock


class RunLogger:
    """Everything that one run writes; of several ranks only rank 0 does."""

    def __init__(self, config: TrainConfig, device: torch.device, rank: int, world_size: int) -> None:
        self.config = config
        self.device = device
        self.rank, self.world_size = rank, world_size
        self.directory = run_directory(config)
        self.facts: dict[str, Any] = {}
        """what `log_summary` was given, for summary.json"""
        self.board: Any = None
        self._lost: set[str] = set()

    def open(self) -> None:
        """Reserve the run folder for this run, on rank 0; raise `UserError` if it cannot be written."""
        from torch.utils.tensorboard import SummaryWriter  # here: --help does not need it

        hook = threading.excepthook  # TensorBoard's thread would print a traceback of what `_or_warn` reports
        threading.excepthook = lambda args: None if type(args.thread).__name__ == "_AsyncWriterThread" else hook(args)
        try:
            self._lock = claim(self.config, self.directory)
            self.board = SummaryWriter(self.directory)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write into {self.directory}: {reason}; choose another --run_dir") from None

    def close(self) -> None:
        """Write the rest of the curves to disk, and release the folder."""
        if self.board:
            with self._or_warn("curves"):
                self.board.close()
            self._lock.close()

    @contextmanager
    def _or_warn(self, what: str) -> Iterator[None]:
        """Let training continue if ``what`` cannot be written, with one warning."""
        try:
            yield
        except OSError as error:
            if what not in self._lost:
                warn(f"cannot write {what} in {self.directory}, training goes on: {error.strerror or error}")
            self._lost.add(what)

    def log(self, line: str) -> None:
        """Print one line without disturbing the progress bar."""
        if self.rank == 0:
            with suppress(OSError):  # the terminal was closed
                tqdm.write(line)

    def log_summary(self, line: str, **facts: object) -> None:
        """Add ``facts`` to summary.json, and print ``line``, which contains them, if they are new."""
        if facts.items() - self.facts.items():
            self.log(line)
        self.facts |= facts

    def add_scalars(self, group: str, values: dict[str, float | None], step: int) -> None:
        """Add a point to each of a group of TensorBoard curves; None is no point."""
        for name, value in values.items():
            if self.board and value is not None:
                with self._or_warn("curves"):
                    self.board.add_scalar(f"{group}/{name}", value, step)

    def add_figure(self, name: str, figure: Any) -> None:  # noqa: ANN401
        """Keep a figure of matplotlib as a file, and among TensorBoard's images."""
        if self.board:
            with self._or_warn(f"{name}.png"):
                figure.savefig(self.directory / f"{name}.png")
                self.board.add_figure(name, figure)

    def log_epoch(self, epoch: dict[str, Any], lr: float) -> None:
        """Print the results that `Run.log_epoch` got, and add them to the curves."""
        accuracy, mfu = epoch["val_accuracy"], epoch.get("mfu")
        self.log(
            f"epoch {epoch['epoch']}  train loss {epoch['train_loss']:.4f}  val loss {epoch['val_loss']:.4f}"
            f"{'' if accuracy is None else f'  accuracy {accuracy:.2%}'}"
            f"  {epoch['seconds']:.1f} s  {epoch['samples_per_second']:,.0f} samples/s"
            f"{'' if mfu is None else f'  mfu {mfu:.1%}'}"
        )
        curves = {name: epoch[name] for name in ("train_loss", "val_loss", "val_accuracy")}
        self.add_scalars("epoch", curves | {"lr": lr}, epoch["epoch"])

    def write_summary(
        self, epochs: list[dict[str, Any]], global_batch_size: int, monitor: dict[str, Any] | None
    ) -> None:
        """Write summary.json, replacing the one before as a whole.

        ``backend`` is the name of what carries the gradients, nccl or gloo; ``backend_class`` is its class in torch,
        because the name does not say which of two NCCL backends ran. Both are null without a process group.
        """
        if self.rank != 0:
            return
        summary = {
            "lesson": lesson_name(),
            "config": dataclasses.asdict(self.config),
            "command": shlex.join(["python", *sys.argv]),
            "hardware": describe_hardware(self.device),
            "versions": describe_versions(),
            "world_size": self.world_size,
            **backend_in_use(self.device),
            "global_batch_size": global_batch_size,
            "epochs": epochs,
            **self.facts,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "monitor": monitor,
        }
        with self._or_warn("summary.json"):
            write_json(self.directory / "summary.json", summary)
