"""What train.py sees of a run: a record of what came out, and a progress that can be stopped and resumed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import torch
from tqdm import tqdm

from workshop.config import TrainConfig
from workshop.distributed.ranks import ONE_PROCESS, Ranks
from workshop.loaders import Loader
from workshop.profiling.timed import TimedLoader
from workshop.run.progress import Progress
from workshop.run.record import Record


class Run:
    """One run of a lesson's script, from its first step, or the one it was stopped after, to its last.

    Used as a context manager: signals to stop are then acted on between two steps, and all that was recorded is on
    disk when the run ends.

    Args:
        config: of the lesson.
        device: that trains.
        ranks: who trains together; by default this process alone.

    Raises UserError: the run folder cannot be written, or not by this run.
    """

    def __init__(self, config: TrainConfig, device: torch.device, ranks: Ranks = ONE_PROCESS) -> None:
        self.config = config
        self.device = device
        self.ranks = ranks
        self.record = Record(config, device, ranks)
        self.progress = Progress(config, device, ranks, self.record.directory / "checkpoint.pt", self.record.log)
        self.progress.agreement.on_main(self.record.open)
        self.resume, self.loss_sum, self.note = self.progress.resume, self.progress.loss_sum, self.record.note
        # Instruments are imported by the runs that use them.
        self.trace = self.monitor = None
        if config.trace and not config.benchmark:
            from workshop.profiling.trace import Trace

            show = self.record.add_picture if ranks.is_main else None
            self.trace = Trace(self.record.directory, device, name=f"rank{ranks.rank}", log=self.record.log, show=show)
        if config.monitor and ranks.is_main:
            from workshop.profiling.monitor import Monitor

            curve = self.record.add_curves
            self.monitor = Monitor(device, lambda name, value, at: curve("monitor", {name: value}, round(at)))
        self._instruments = ExitStack()

    def __enter__(self) -> "Run":
        self.record.log(f"writing to {self.record.directory}, computing on {self.device}")
        for instrument in (None if self.config.benchmark else self.progress.stop, self.trace, self.monitor):
            if instrument:
                self._instruments.enter_context(instrument)
        return self

    def __exit__(self, *exception: object) -> None:
        self._instruments.close()  # first: the monitor writes to the record
        if self.monitor:
            self.record.log(self.monitor.table())
            if self.progress.epochs and self.progress.loader:  # a resumed run may have had nothing left to do
                self._write_summary()  # once more, with the last sample
        self.record.close()

    def watch(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over one epoch of training batches, timing them; with a progress bar if this is a terminal."""
        self.progress.begin_epoch(loader)
        self._timed = TimedLoader(loader, window=self.config.log_interval)
        hidden = None if self._shows_steps else True  # None: hidden where there is no terminal
        first = self.progress.step
        batches = tqdm(self._timed, initial=first, total=len(loader), unit="batch", leave=False, disable=hidden)
        return self.trace.watch(batches, steps=len(loader) - first) if self.trace else iter(batches)

    def end_step(self, loss: torch.Tensor) -> None:
        """Count a training step; log it every ``--log_interval`` steps; save or stop if it is time to."""
        self.progress.count_step(loss)
        if self.progress.step % self.config.log_interval == 0 and self._shows_steps:
            self._log_step(loss.item())
        self.progress.save_or_stop()

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

        Raises UserError: one of the losses was not finite.
        """
        self.progress.check_losses()
        seconds += self.progress.seconds_before
        finished = {
            "epoch": epoch,
            "train_loss": train_loss,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "seconds": seconds,
            "samples_per_second": self.progress.loader.sampler.samples / seconds,
        }
        self.progress.end_epoch(finished)
        self.record.log_epoch(finished, lr)
        self.record.notes["first_step_seconds"] = self.progress.first_step_seconds
        self._write_summary()

    def save(self) -> None:
        """Write a checkpoint after an epoch; stop if told to and if there is an epoch left."""
        self.progress.save()

    def benchmark(
        self,
        loader: Loader,
        train: Callable[[Loader], object],
        no_sync: Callable[[], AbstractContextManager] | None = None,
    ) -> None:
        """Measure how fast loading and training are, alone and together; ``train`` trains on the loader it is given.

        With ``no_sync``, which makes a context without communication, also how fast training is in that.
        """
        from workshop.profiling.throughput import benchmark

        config = self.config
        seconds = config.benchmark_seconds
        benchmark(loader, train, self.device, config.loader, self.record.directory, seconds, no_sync)

    @property
    def _shows_steps(self) -> bool:
        return self.ranks.is_main and not self.config.benchmark

    def _log_step(self, loss: float) -> None:
        """Log the loss of the step under way, the throughput, and the moving averages of load and compute time."""
        load, compute = self._timed.means()
        progress, loader = self.progress, self.progress.loader
        samples_per_second = loader.sampler.global_batch_size / (load + compute)
        step, steps = progress.step, len(loader)
        self.record.log(
            f"epoch {len(progress.epochs) + 1}  step {step:{len(str(steps))}}/{steps}  loss {loss:.4f}  "
            f"{samples_per_second:,.0f} samples/s  load {1000 * load:.2f} ms  compute {1000 * compute:.2f} ms"
        )
        curves = {"loss": loss, "samples_per_second": samples_per_second, "load_seconds": load}
        self.record.add_curves("train", curves | {"compute_seconds": compute}, progress.steps + step)

    def _write_summary(self) -> None:
        progress = self.progress
        monitor = self.monitor.summary() if self.monitor else None
        self.record.write_summary(progress.epochs, progress.loader.sampler.global_batch_size, monitor)
