"""The record of a run: its folder, log lines, TensorBoard curves and summary.json."""

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from workshop.config import TrainConfig
from workshop.distributed import Ranks
from workshop.errors import UserError, warn
from workshop.hardware import describe_hardware, describe_versions, only_imitates, peak_memory_bytes
from workshop.loaders import Loader
from workshop.paths import default_runs_dir
from workshop.profiling.monitor import Monitor
from workshop.profiling.throughput import benchmark
from workshop.profiling.timed import TimedLoader
from workshop.profiling.trace import Trace
from workshop.resumable import Resumable


def lesson_name() -> str:
    """Return the name of the folder whose script is running."""
    return Path(sys.argv[0]).resolve().parent.name


def run_directory(config: TrainConfig) -> Path:
    """Return ``--run_dir``, else lesson and run name under the runs folder.

    A job that Slurm requeues must find its checkpoint again, so the run name is the job id, never a date; outside
    Slurm it is the name of the data set.
    """
    return config.run_dir or default_runs_dir() / lesson_name() / os.environ.get("SLURM_JOB_ID", config.dataset)


class _NoBoard:
    """Stands in for the TensorBoard writer on ranks that record nothing."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Run(Resumable):
    """Everything one run writes down; of several ranks only the main one does, the others are silent.

    Used as a context manager, so that the curves are complete on disk when the run ends. Training without ``--resume
    true`` replaces the record of an earlier run in the same folder.

    Raises:
        UserError: the run folder cannot be written.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.directory = run_directory(config)
        super().__init__(config, ranks, self.directory)
        self.notes: dict[str, Any] = {}
        self.quiet = not ranks.is_main
        try:
            self.board = self._open_board() if ranks.is_main else _NoBoard()
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write into {self.directory}: {reason}; choose another --run_dir") from None
        self.trace = Trace(
            self.directory,
            ranks.device,
            enabled=config.trace and not config.benchmark,
            name=f"rank{ranks.rank}",
            log=self.log,
        )
        self.monitor = Monitor(ranks.device, self._record_sample) if config.monitor and ranks.is_main else None
        self._instruments = ExitStack()

    def _open_board(self) -> SummaryWriter:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.config.resume or self.config.benchmark):
            for pattern in ("events.out.tfevents.*", "*.pt.trace.json.gz", "*.json", "checkpoint.*"):
                for file in self.directory.glob(pattern):
                    file.unlink()
        return SummaryWriter(self.directory)

    def __enter__(self) -> "Run":
        self.log(f"writing to {self.directory}, computing on {self.ranks.device}")
        precision = getattr(self.config, "precision", "fp32")  # each lesson has its own choice of formats
        if self.ranks.is_main and only_imitates(self.ranks.device, precision):
            warn(f"this CPU has no instructions for {precision} and imitates it, slower than --precision fp32 would be")
        self._instruments.enter_context(self.stop)
        self._instruments.enter_context(self.trace)
        if self.monitor:
            self._instruments.enter_context(self.monitor)
        return self

    def __exit__(self, *exception: object) -> None:
        self._instruments.close()  # first: the monitor writes to the board
        if self.monitor:
            self.log(self.monitor.table())
            if self.epochs:
                self._write_summary()  # once more, with the last sample
        self.board.close()

    def end_step(self, loss: torch.Tensor) -> None:
        """Count a training step; log it every ``--log_interval`` steps; save or stop if it is time to."""
        self.count_step(loss)
        if self.step % self.config.log_interval == 0 and not self.quiet:
            self._log_step(loss.item())
        self.save_or_stop()

    def watch(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over one epoch of training batches, timing them; with a progress bar if this is a terminal."""
        self.begin_epoch(loader)
        self._timed = TimedLoader(loader, window=self.config.log_interval)
        hidden = True if self.quiet else None  # None: hidden where there is no terminal
        batches = tqdm(self._timed, initial=self.step, total=len(loader), unit="batch", leave=False, disable=hidden)
        return self.trace.watch(batches, steps=len(loader) - self.step)

    def benchmark(
        self,
        loader: Loader,
        train: Callable[[Loader], object],
        no_sync: Callable[[], AbstractContextManager] | None = None,
    ) -> None:
        """Measure how fast loading and training are, alone and together; ``train`` trains on the loader it is given.

        With ``no_sync``, which makes a context without communication, also how fast training is in that.
        """
        self.quiet = True
        benchmark(loader, train, self.config.loader, self.directory, self.config.benchmark_seconds, no_sync)
        self.quiet = not self.ranks.is_main

    def note(self, line: str, **facts: object) -> None:
        """Put ``facts`` into summary.json, and print ``line``, which tells them, if they are new."""
        if facts.items() - self.notes.items():
            self.log(line)
        self.notes |= facts

    def _log_step(self, loss: float) -> None:
        """Log the loss of the step under way, the throughput, and the moving averages of load and compute time."""
        load, compute = self._timed.means()
        samples_per_second = self._loader.sampler.global_batch_size / (load + compute)
        step, steps = self.step, len(self._loader)
        self.log(
            f"epoch {len(self.epochs) + 1}  step {step:{len(str(steps))}}/{steps}  loss {loss:.4f}  "
            f"{samples_per_second:,.0f} samples/s  load {1000 * load:.2f} ms  compute {1000 * compute:.2f} ms"
        )
        steps_done = self.steps + step
        self.board.add_scalar("train/loss", loss, steps_done)
        self.board.add_scalar("train/samples_per_second", samples_per_second, steps_done)
        self.board.add_scalar("train/load_seconds", load, steps_done)
        self.board.add_scalar("train/compute_seconds", compute, steps_done)

    def log_epoch(
        self, epoch: int, seconds: float, lr: float, train_loss: float, val_loss: float, val_accuracy: float | None
    ) -> None:
        """Log a finished epoch and write summary.json.

        Args:
            epoch: counted from 1.
            seconds: duration of its training part, since the run was resumed if that was in the middle of it.
            lr: learning rate at its end, which is 0 at the end of a cosine.
            train_loss: mean over its training samples.
            val_loss: mean over the validation samples.
            val_accuracy: share of them classified right; None where there are no classes.

        Raises:
            UserError: one of the losses was not finite.
        """
        self.check_losses()
        seconds += self.seconds_before
        samples_per_second = self._loader.sampler.samples / seconds
        self.end_epoch(
            {
                "epoch": epoch,
                "train_loss": train_loss,
                "val_loss": val_loss,
                "val_accuracy": val_accuracy,
                "seconds": seconds,
                "samples_per_second": samples_per_second,
            }
        )
        accuracy = "" if val_accuracy is None else f"  accuracy {val_accuracy:.2%}"
        self.log(
            f"epoch {epoch}  train loss {train_loss:.4f}  val loss {val_loss:.4f}{accuracy}"
            f"  {seconds:.1f} s  {samples_per_second:,.0f} samples/s"
        )
        self.board.add_scalar("epoch/train_loss", train_loss, epoch)
        self.board.add_scalar("epoch/val_loss", val_loss, epoch)
        self.board.add_scalar("epoch/lr", lr, epoch)
        if val_accuracy is not None:
            self.board.add_scalar("epoch/val_accuracy", val_accuracy, epoch)
        self._write_summary()

    def _record_sample(self, name: str, value: float, seconds: float) -> None:
        self.board.add_scalar(f"monitor/{name}", value, round(seconds))

    def _write_summary(self) -> None:
        if not self.ranks.is_main:
            return
        summary = {
            "lesson": lesson_name(),
            "config": dataclasses.asdict(self.config),
            "command": shlex.join(["python", *sys.argv]),
            "hardware": describe_hardware(self.ranks.device),
            "versions": describe_versions(),
            "world_size": self.ranks.world_size,
            "global_batch_size": self._loader.sampler.global_batch_size,
            "epochs": self.epochs,
            **self.notes,
            "peak_memory_bytes": peak_memory_bytes(self.ranks.device),
            "monitor": self.monitor and self.monitor.summary(),
        }
        temporary = self.directory / "summary.tmp"
        temporary.write_text(json.dumps(summary, indent=2, default=str) + "\n")
        temporary.replace(self.directory / "summary.json")
