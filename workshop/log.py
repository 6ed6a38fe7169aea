"""What a run leaves in its folder and on the screen: log lines, TensorBoard curves, summary.json."""

import dataclasses
import fcntl
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from workshop.config import TrainConfig
from workshop.errors import UserError, warn
from workshop.explain import backend_class, let_threads_finish_before_forks
from workshop.hardware import available_cpus, describe_hardware, describe_versions, peak_memory_bytes
from workshop.loaders.sampler import Loader
from workshop.paths import default_runs_dir, lesson_name, read_json, write_json
from workshop.profiling.timed_loader import TimedLoader

if TYPE_CHECKING:
    from workshop.profiling.mfu import Utilization

OF_A_RUN = ("summary.json", "throughput.json", "events.out.tfevents.*", "checkpoint*", "rank*.json.gz", "trace.png")
"""names of the files and folders that a run writes into its folder"""


def run_directory(config: TrainConfig) -> Path:
    """Return ``--run_dir``, otherwise lesson and run name under the runs folder.

    A job that Slurm requeues must find its checkpoint again. So the run name is the job id, never a date; outside Slurm
    it is the name of the data set.
    """
    return config.run_dir or default_runs_dir() / lesson_name() / os.environ.get("SLURM_JOB_ID", config.dataset)


class RunLogger:
    """Log lines, TensorBoard curves and summary.json of one run; of several ranks only rank 0 writes them.

    A context manager: at its end all files are complete.

    Args:
        config: of the lesson.
        device: that trains.
        rank: of this process; by default it is the only one.
        world_size: number of ranks that train together.
        tokens_per_sample: of a language model: speeds are then logged in tokens.

    Raises:
        UserError: another run writes into the folder.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        tokens_per_sample: int | None = None,
    ) -> None:
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        self.tokens_per_sample = tokens_per_sample
        self.run_dir = run_directory(config)
        self.epochs: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        """what `log_summary` was given, for summary.json"""
        self.utilization: Utilization | None = None
        self.board: Any = None
        self.monitor: Any = None
        self.trace: Any = None
        self._loader: Any = None
        self._opened = ExitStack()
        let_threads_finish_before_forks()
        if rank == 0:
            self._open_folder()
            if config.num_workers > available_cpus():
                warn(f"--num_workers {config.num_workers} is more than the {available_cpus()} CPUs of this process")
        # Instruments are imported only by the runs that use them.
        if config.trace and not config.benchmark:
            from workshop.profiling.trace import Trace

            show = self._add_figure if rank == 0 else None
            self.trace = Trace(self.run_dir, device, name=f"rank{rank}", log=self.print, show=show)
        if config.monitor and rank == 0:
            from workshop.profiling.monitor import Monitor

            self.monitor = Monitor(device, lambda name, value, at: self._add("monitor", {name: value}, round(at)))

    def _open_folder(self) -> None:
        """Reserve the folder for this run; move what an earlier run has left there into ``earlier/NUMBER``."""
        from torch.utils.tensorboard import SummaryWriter  # here: --help does not need it

        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._opened.enter_context(_locked(self.run_dir))
        if self.config.resume:
            self.epochs = read_json(self.run_dir / "summary.json").get("epochs", [])
        elif not self.config.benchmark:
            found = [file for pattern in OF_A_RUN for file in self.run_dir.glob(pattern)]
            number = next(n for n in range(1, 1_000_000) if not (self.run_dir / f"earlier/{n}").exists())
            for file in found:
                (self.run_dir / f"earlier/{number}").mkdir(parents=True, exist_ok=True)
                file.rename(self.run_dir / f"earlier/{number}" / file.name)
        self.board = self._opened.enter_context(SummaryWriter(self.run_dir))

    def __enter__(self) -> "RunLogger":
        self.print(f"writing to {self.run_dir}, computing on {self.device}")
        for instrument in filter(None, (self.trace, self.monitor)):
            self._opened.enter_context(instrument)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()
        if self.monitor:
            self.print(self.monitor.table())
            trained = self._loader is not None and not self.config.benchmark
            if kind is None and self.epochs and trained:
                self._write_summary()  # once more, with the last sample

    def print(self, line: str) -> None:
        """Print one line, on rank 0."""
        if self.rank == 0:
            print(line, flush=True)

    def batches(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the training batches (inputs, targets) of one epoch; measure how long each is waited for."""
        self._loader = loader
        self._timed: TimedLoader = TimedLoader(loader, window=self.config.log_interval)
        if self.trace:
            return self.trace.traced(self._timed, steps=len(loader) - loader.batch_sampler.start_step)
        return iter(self._timed)

    def log_step(self, epoch: int, step: int, loss: float) -> None:
        """Print the loss after ``step`` of ``epoch``, both counted from 1, and the speed of the last steps.

        The samples per second of all ranks, and per step the time spent on waiting for a batch and on everything else.
        """
        if self.rank != 0 or self.config.benchmark:
            return
        load, compute = self._timed.means()
        samples_per_second = self._loader.batch_sampler.global_batch_size / (load + compute)
        steps, mfu = len(self._loader), self.mfu(samples_per_second)
        self.print(
            f"epoch {epoch}  step {step:{len(str(steps))}}/{steps}  loss {loss:.4f}  "
            f"{self._speed(samples_per_second)}  load {1000 * load:.2f} ms  compute {1000 * compute:.2f} ms"
            f"{'' if mfu is None else f'  mfu {mfu:.1%}'}"
        )
        values = {"loss": loss, "samples_per_second": samples_per_second, "load_seconds": load, "mfu": mfu}
        self._add("train", values | {"compute_seconds": compute}, (epoch - 1) * steps + step)

    def log_epoch(
        self,
        epoch: int,
        seconds: float,
        samples: int,
        lr: float,
        train_loss: float,
        val_loss: float,
        val_accuracy: float | None,
    ) -> None:
        """Print the results of a finished epoch, and write them to summary.json and TensorBoard.

        Args:
            epoch: counted from 1.
            seconds: duration of its training, since the run was resumed if that was within the epoch.
            samples: that all ranks have trained on in these seconds.
            lr: learning rate at its end, which is 0 at the end of a cosine.
            train_loss: mean over its training samples.
            val_loss: mean over the validation samples.
            val_accuracy: share of them classified correctly; None where there are no classes.
        """
        if self.rank != 0:
            return
        speed = samples / seconds
        losses = {"train_loss": train_loss, "val_loss": val_loss, "val_accuracy": val_accuracy}
        finished = {"epoch": epoch, **losses, "seconds": seconds, "samples_per_second": speed}
        if (mfu := self.mfu(speed)) is not None:
            finished["mfu"] = self.facts["mfu"] = mfu
        memory = ""
        if self.tokens_per_sample:
            finished["tokens_per_second"] = speed * self.tokens_per_sample
            memory = f"  peak memory {peak_memory_bytes(self.device) / 1e9:.2f} GB"
        self.print(
            f"epoch {epoch}  train loss {train_loss:.4f}  val loss {val_loss:.4f}"
            f"{'' if val_accuracy is None else f'  accuracy {val_accuracy:.2%}'}"
            f"  {seconds:.1f} s  {self._speed(speed)}{'' if mfu is None else f'  mfu {mfu:.1%}'}{memory}"
        )
        self._add("epoch", losses | {"lr": lr}, epoch)
        self.epochs = [earlier for earlier in self.epochs if earlier["epoch"] < epoch] + [finished]
        self._write_summary()

    def log_summary(self, line: str, **facts: object) -> None:
        """Add ``facts`` to summary.json, and print ``line``, which contains them, if they are new."""
        if facts.items() - self.facts.items():
            self.print(line)
        self.facts |= facts
        if self.epochs and self._loader is not None:  # else the end of the first epoch writes it
            self._write_summary()

    def log_utilization(self, utilization: "Utilization") -> None:
        """Show the model FLOPs utilization in log lines and summary.json from here on; that of rank 0's device."""
        self.utilization = utilization
        peak, step = utilization.peak_flops_per_second, utilization.model_flops_per_step
        self.log_summary(
            f"peak of matrix products in this precision: {peak / 1e12:.3g} TFLOP/s; a step of the model: "
            f"{step / 1e12:.3g} TFLOP",
            peak_flops_per_second=peak,
            model_flops_per_step=step,
        )

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the utilization at a throughput of all ranks together; None if it is not measured."""
        return None if self.utilization is None else self.utilization.mfu(samples_per_second / self.world_size)

    def _speed(self, samples_per_second: float) -> str:
        """Return the speed of all ranks, in samples or tokens; of tokens also that of one rank."""
        if not self.tokens_per_sample:
            return f"{samples_per_second:,.0f} samples/s"
        tokens = samples_per_second * self.tokens_per_sample
        of_a_rank = f" ({tokens / self.world_size:,.0f} per rank)" if self.world_size > 1 else ""
        return f"{tokens:,.0f} tokens/s{of_a_rank}"

    def _add(self, group: str, values: dict[str, float | None], step: int) -> None:
        """Add a point to each of a group of TensorBoard curves; None is no point."""
        for name, value in values.items():
            if value is not None:
                self.board.add_scalar(f"{group}/{name}", value, step)

    def _add_figure(self, name: str, figure: Any) -> None:  # noqa: ANN401
        """Keep a figure of matplotlib as a file, and among TensorBoard's images."""
        figure.savefig(self.run_dir / f"{name}.png")
        self.board.add_figure(name, figure)

    def _write_summary(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        summary = {
            "lesson": lesson_name(),
            "config": dataclasses.asdict(self.config),
            "command": shlex.join(["python", *sys.argv]),
            "node": platform.node(),  # the first one of several
            "hardware": describe_hardware(self.device),
            "versions": describe_versions(),
            "world_size": self.world_size,
            "backend": dist.get_backend() if joined else None,
            "backend_class": backend_class(self.device) if joined else None,
            "global_batch_size": self._loader.batch_sampler.global_batch_size,
            "epochs": self.epochs,
            **self.facts,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "monitor": self.monitor.summary() if self.monitor else None,
        }
        write_json(self.run_dir / "summary.json", summary)


def _locked(folder: Path) -> TextIO:
    """Return a file that keeps other runs out of the folder until it is closed or the process ends."""
    lock = (folder / "workshop_run.lock").open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike that of flock, workers do not inherit this lock
    except BlockingIOError:
        raise UserError(f"another run writes to {folder}; choose another --run_dir") from None
    except OSError:  # a file system without locks
        pass
    return lock
