"""The log of a run: lines on the screen with the time, TensorBoard curves, and what summary.json says of an epoch."""

import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from torch.profiler import record_function

from workshop import start
from workshop.hardware import OtherWork, peak_memory_bytes
from workshop.loaders.sampler import Loader
from workshop.run import RunFolder


class Progress(Protocol):
    """How far a run has come. The scripts have a class of this name."""

    epoch: int
    step: int


class Utilization(Protocol):
    """Computes the model FLOPs utilization of a throughput."""

    @property
    def peak_flops_per_second(self) -> float: ...  # noqa: D102

    @property
    def model_flops_per_step(self) -> float: ...  # noqa: D102

    def mfu(self, samples_per_second: float) -> float: ...  # noqa: D102


class Instrument(Protocol):
    """An observer of the steps, such as a trace."""

    def start_epoch(self, loader: Loader) -> None: ...  # noqa: D102

    def end_step(self) -> None: ...  # noqa: D102


class Log(AbstractContextManager):
    """Lines, TensorBoard curves and the summary of a run; of several ranks only rank 0 writes them.

    Args:
        folder: of the run.
        tokens_per_sample: of a language model: speeds are then logged in tokens.
    """

    def __init__(self, folder: RunFolder, tokens_per_sample: int | None = None) -> None:
        self.folder, self.config, self.ranks = folder, folder.config, folder.ranks
        self.tokens_per_sample = tokens_per_sample
        self.utilization: Utilization | None = None
        self.board: Any = None
        """TensorBoard's writer, on rank 0"""
        self.instruments: list[Instrument] = []
        self._steps = 0
        self._asked = 0.0
        self._waiting: Any = None
        self._other_work = OtherWork()
        self._start, start.current = (start.current if self.config.start_times else None), None
        window = self.config.log_interval
        self._begins, self._waits = deque[float](maxlen=window), deque[float](maxlen=window)

    def __enter__(self) -> Self:
        if self.ranks.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # here: --help does not need it

            self.board = SummaryWriter(self.folder.path)
        self.print(f"writing to {self.folder.path}, computing on {self.ranks.device}")
        return self

    def __exit__(self, *exception: object) -> None:
        # Several ranks on one machine would count each other, and a benchmark looks for itself.
        looks = exception[0] is None and self.ranks.world_size == 1 and not self.config.benchmark
        if looks and (note := self._other_work.note(self.config.num_workers)):
            self.print(f"note: {note}")
        if self.board:
            self.board.close()

    def print(self, line: str) -> None:
        """Print one line with the time, on rank 0."""
        if self.ranks.rank == 0:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    # The time between two steps is spent on waiting for a batch. Nothing here waits for the device: on an accelerator
    # the compute time of one step is the time to *launch* it. The loop catches up with the device where it reads a
    # value from it, so the mean over all steps since the last such read is true: that is what the log shows.

    def start_epoch(self, loader: Loader) -> None:
        """Note that the loop is about to ask ``loader`` for its first batch."""
        self._steps = len(loader)
        self._begins.clear()
        self._waits.clear()
        for instrument in self.instruments:
            instrument.start_epoch(loader)
        if self._start:
            self._start.start_epoch()
        self._wait()

    def start_step(self) -> None:
        """Note that a batch is here."""
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        if self._start:
            self._start.first_batch()
        self._begins.append(self._asked)
        self._waits.append(time.perf_counter() - self._asked)

    def end_step(self) -> None:
        """Note that the loop is about to ask for the next batch."""
        if self._start:
            self.print(self._start.table(self.ranks.device))
            self._start = None
        for instrument in self.instruments:
            instrument.end_step()
        self._wait()

    def _wait(self) -> None:
        self._asked = time.perf_counter()
        self._waiting = record_function("data")  # the name of this wait in a profiler
        self._waiting.__enter__()

    def log_step(self, progress: Progress, loss: float, **more: float) -> None:
        """Print the loss after a step, and the speed of the last ``--log_interval`` steps.

        The samples per second of all ranks, and per step the time spent on waiting for a batch and on everything else.

        Args:
            progress: epoch, and steps taken in it.
            loss: of this step.
            more: other values of this step, by name.
        """
        if self.ranks.rank != 0 or self.config.benchmark:
            return
        seconds = (time.perf_counter() - self._begins[0]) / len(self._begins)
        load = sum(self._waits) / len(self._waits)
        samples_per_second = self.folder.global_batch_size / seconds
        steps, mfu = self._steps, self.mfu(samples_per_second)
        values = "".join(f"{name.replace('_', ' ')} {value:.3g}  " for name, value in more.items())
        self.print(
            f"epoch {progress.epoch}  step {progress.step:{len(str(steps))}}/{steps}  loss {loss:.4f}  {values}"
            f"{self._speed(samples_per_second)}  load {1000 * load:.2f} ms  compute {1000 * (seconds - load):.2f} ms"
            f"{'' if mfu is None else f'  mfu {mfu:.1%}'}"
        )
        curves = {"loss": loss, **more, "samples_per_second": samples_per_second, "load_seconds": load, "mfu": mfu}
        self.add("train", curves | {"compute_seconds": seconds - load}, (progress.epoch - 1) * steps + progress.step)

    def log_epoch(
        self,
        epoch: int,
        *,
        train_loss: float,
        val_loss: float,
        val_accuracy: float | None = None,
        lr: float,
        samples: int,
        seconds: float,
        val_seconds: float,
    ) -> None:
        """Print the results of a finished epoch, and write them to summary.json and TensorBoard.

        Args:
            epoch: counted from 1.
            train_loss: mean over its training samples.
            val_loss: mean over the validation samples.
            val_accuracy: share of them classified correctly; None where there are no classes.
            lr: learning rate at its end, which is 0 at the end of a cosine.
            samples: that all ranks have trained on in these seconds.
            seconds: duration of its training, since the run was resumed if that was within the epoch.
            val_seconds: duration of its validation.
        """
        if self.ranks.rank != 0:
            return
        speed = samples / seconds
        losses = {"train_loss": train_loss, "val_loss": val_loss, "val_accuracy": val_accuracy}
        finished = {"epoch": epoch, **losses, "seconds": seconds, "samples_per_second": speed}
        finished["val_seconds"] = val_seconds
        if (mfu := self.mfu(speed)) is not None:
            finished["mfu"] = self.folder.facts["mfu"] = mfu
        memory = ""
        if self.tokens_per_sample:
            finished["tokens_per_second"] = speed * self.tokens_per_sample
            memory = f"  peak memory {peak_memory_bytes(self.ranks.device) / 1e9:.2f} GB"
        self.print(
            f"epoch {epoch}  train loss {train_loss:.4f}  val loss {val_loss:.4f}"
            f"{'' if val_accuracy is None else f'  accuracy {val_accuracy:.2%}'}"
            f"  {seconds:.1f} s  {self._speed(speed)}{'' if mfu is None else f'  mfu {mfu:.1%}'}{memory}"
            f"  validation {val_seconds:.1f} s"
        )
        self.add("epoch", losses | {"lr": lr}, epoch)
        self.folder.epochs = [earlier for earlier in self.folder.epochs if earlier["epoch"] < epoch] + [finished]
        self.folder.write_summary()

    def log_summary(self, line: str, **facts: object) -> None:
        """Add ``facts`` to summary.json, and print ``line``, which contains them, if they are new."""
        if facts.items() - self.folder.facts.items():
            self.print(line)
        self.folder.facts |= facts
        if self._steps and self.folder.epochs:  # else the end of the first epoch writes it
            self.folder.write_summary()

    def log_utilization(self, utilization: Utilization) -> None:
        """Show the model FLOPs utilization of rank 0's device in log lines and summary.json from here on."""
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
        if self.utilization is None:
            return None
        return self.utilization.mfu(samples_per_second / self.ranks.world_size)

    def _speed(self, samples_per_second: float) -> str:
        """Return the speed of all ranks, in samples or tokens; with tokens, the speed of one rank too."""
        if not self.tokens_per_sample:
            return f"{samples_per_second:,.0f} samples/s"
        tokens = samples_per_second * self.tokens_per_sample
        of_a_rank = f" ({tokens / self.ranks.world_size:,.0f} per rank)" if self.ranks.world_size > 1 else ""
        return f"{tokens:,.0f} tokens/s{of_a_rank}"

    def add(self, group: str, values: dict[str, float | None], step: int) -> None:
        """Add a point to each of a group of TensorBoard curves, on rank 0; None is no point."""
        for name, value in values.items():
            if value is not None and self.board:
                self.board.add_scalar(f"{group}/{name}", value, step)

    def add_figure(self, name: str, figure: Any) -> None:  # noqa: ANN401
        """Keep a figure of matplotlib as a file, and among TensorBoard's images."""
        if self.board:
            figure.savefig(self.folder.path / f"{name}.png")
            self.board.add_figure(name, figure)
