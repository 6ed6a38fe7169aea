"""What a train script sees of a run: its position, which survives a stop, and the files that it leaves."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from workshop.config import TrainConfig
from workshop.errors import warn
from workshop.hardware import available_cpus
from workshop.loaders.sampler import Loader
from workshop.profiling.timed_loader import TimedLoader
from workshop.run.logger import RunLogger
from workshop.run.position import Position

if TYPE_CHECKING:
    from workshop.profiling.mfu import Utilization
    from workshop.run.sharded import Loading, Saving


class Run:
    """One run of a lesson's script, from its first step, or the one after which it was stopped, to its last.

    As a context manager it acts on signals to stop between two steps, and has all files complete on disk when it ends.

    Args:
        config: of the lesson.
        device: that trains.
        rank: of this process; by default it is the only one.
        world_size: number of ranks that train together.

    Raises:
        UserError: the run folder cannot be written, or another run writes there.
    """

    def __init__(self, config: TrainConfig, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.config = config
        self.device = device
        self.rank = rank
        self.logger = RunLogger(config, device, rank, world_size)
        checkpoint = self.logger.directory / "checkpoint.pt"
        self.position = Position(config, device, rank, world_size, checkpoint, self.logger.log)
        self.position.control.on_rank0(self.logger.open)
        if rank == 0 and config.num_workers > available_cpus():
            warn(f"--num_workers {config.num_workers} is more than the {available_cpus()} CPUs this process may use")
        # Instruments are imported only by the runs that use them.
        self.trace = self.monitor = None
        if config.trace and not config.benchmark:
            from workshop.profiling.trace import Trace

            show = self.logger.add_figure if rank == 0 else None
            self.trace = Trace(self.logger.directory, device, name=f"rank{rank}", log=self.logger.log, show=show)
        if config.monitor and rank == 0:
            from workshop.profiling.monitor import Monitor

            add = self.logger.add_scalars
            self.monitor = Monitor(device, lambda name, value, at: add("monitor", {name: value}, round(at)))
        self.utilization: Utilization | None = None
        self._instruments = ExitStack()

    def __enter__(self) -> "Run":
        self.logger.log(f"writing to {self.logger.directory}, computing on {self.device}")
        for instrument in (None if self.config.benchmark else self.position.stop, self.trace, self.monitor):
            if instrument:
                self._instruments.enter_context(instrument)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.position.wait_for_save(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._instruments.close()  # first, because the monitor writes to the logger
        if self.monitor:
            self.logger.log(self.monitor.table())
            if self.position.results and self.position.loader:  # a resumed run may have had nothing left to do
                self._write_summary()  # once more, with the last sample
        self.logger.close()

    @property
    def next_epoch(self) -> int:
        """The epoch to begin with, counted from 1: after `load_checkpoint`, the one in which the run was stopped."""
        return self.position.epoch

    @property
    def partial_loss_sum(self) -> float:
        """Sum of the losses that this rank had in the current epoch before the run was stopped within it; usually 0."""
        return self.position.partial_loss_sum

    def load_checkpoint(self, matching: dict[str, Any]) -> dict[str, Any] | None:
        """Return the latest good checkpoint, if ``--resume true`` asks for it and there is one; otherwise None.

        Its tensors are on the CPU. The position within the run and the random states are set to what they were; the
        caller loads the rest. Learning rates are those of the checkpoint, scaled if ``--lr`` has changed.

        Args:
            matching: what this run would save; the checkpoint must have the same keys and shapes.

        Raises:
            UserError: the checkpoints are damaged, or of a run that this one cannot continue.
        """
        return self.position.load(matching) if self.config.resume else None

    def load_sharded(self, matching: dict[str, Any]) -> "AbstractContextManager[Loading | None]":
        """Give the latest good sharded checkpoint, if ``--resume true`` asks for it and there is one; otherwise None.

        A context manager, within which the caller reads the tensors with ``dcp.load``. Every file has been compared
        with its checksum by then. All ranks call this; the position within the run and the random states are set.

        Args:
            matching: what this run would save; the checkpoint must have the same keys and (whole) shapes.

        Raises:
            UserError: the checkpoints are damaged, or of a run that this one cannot continue.
        """
        return self.position.load_sharded(matching) if self.config.resume else nullcontext()

    def batches(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the training batches (inputs, targets) of one epoch; measure how long each is waited for.

        On a terminal it shows a progress bar. After a stop within the epoch, it begins where the run was stopped.

        Raises:
            UserError: a loss of this epoch was not finite.
        """
        self.position.begin_epoch(loader)
        self._timed = TimedLoader(loader, window=self.config.log_interval)
        hidden = None if self._logs_steps else True  # None: hidden where there is no terminal
        first = self.position.step
        batches = tqdm(self._timed, initial=first, total=len(loader), unit="batch", leave=False, disable=hidden)
        yield from self.trace.traced(batches, steps=len(loader) - first) if self.trace else batches
        if not self.config.benchmark:
            self.position.end_epoch()

    def end_step(self, loss: torch.Tensor) -> None:
        """Count a training step; every ``--log_interval`` steps print its loss: there the CPU waits for the device."""
        self.position.count_step(loss)
        if self.position.step % self.config.log_interval == 0 and self._logs_steps:
            self._log_step(loss.item())

    def should_save(self) -> bool:
        """Return whether to `save` after this step: ``--save_interval`` steps have passed, or a signal asks to stop.

        All ranks get the same answer. About once a second they exchange it; other steps cost nothing.

        Raises:
            UserError: a loss was not finite.
        """
        return self.position.should_save()

    def save(self, state: dict[str, Any], loss_sum: torch.Tensor | None = None) -> None:
        """Write a checkpoint; if a signal has asked this run to stop, end it with status 0.

        All ranks call this, because each adds its own random state; rank 0 writes the file. There is a complete file
        at every moment, and the one before is kept as ``checkpoint.previous.pt``.

        Args:
            state: what `load_checkpoint` returns in a resumed run.
            loss_sum: within an epoch, the sum () of this rank's losses so far.

        Raises:
            UserError: the file cannot be written, or the weights are not finite.
        """
        self.position.save(state, loss_sum)

    def save_sharded(
        self, sharded: dict[str, Any], state: dict[str, Any], loss_sum: torch.Tensor | None = None
    ) -> "AbstractContextManager[Saving]":
        """Save a checkpoint to which every rank writes its part; like `save`, it may end the run.

        A context manager, within which the caller writes ``sharded`` with ``dcp.save`` or ``dcp.async_save``, into a
        folder with a temporary name. This adds the rest, and checksums; when all is on disk, the folder gets its name.
        After ``dcp.async_save`` a thread does so. The next save and the end of the run wait for it.

        Args:
            sharded: what the caller writes; its "model" is checked for values that are not finite.
            state: the rest of what is to be saved, equal on all ranks.
            loss_sum: within an epoch, the sum () of this rank's losses so far.

        Raises:
            UserError: the folder cannot be written, or the weights are not finite.
        """
        return self.position.save_sharded(sharded, state, loss_sum)

    def log_epoch(
        self, epoch: int, seconds: float, lr: float, train_loss: float, val_loss: float, val_accuracy: float | None
    ) -> None:
        """Print the results of a finished epoch, and write them to summary.json and TensorBoard; only rank 0 needs to.

        Args:
            epoch: counted from 1.
            seconds: duration of its training, since the run was resumed if that was within the epoch.
            lr: learning rate at its end, which is 0 at the end of a cosine.
            train_loss: mean over its training samples.
            val_loss: mean over the validation samples.
            val_accuracy: share of them classified correctly; None where there are no classes.
        """
        assert self.position.loader is not None, "log_epoch before any epoch"
        seconds += self.position.earlier_seconds
        finished = {
            "epoch": epoch,
            "train_loss": train_loss,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "seconds": seconds,
            "samples_per_second": len(self.position.loader.dataset) / seconds,
        }
        if self.utilization:
            finished["mfu"] = self._mfu(len(self.position.loader.dataset) / seconds)
            self.logger.facts["mfu"] = finished["mfu"]
        self.position.results.append(finished)
        self.logger.log_epoch(finished, lr)
        self.logger.facts["first_step_seconds"] = self.position.first_step_seconds
        self._write_summary()

    def log_summary(self, line: str, **facts: object) -> None:
        """Add ``facts`` to summary.json, and print ``line``, which contains them, if they are new."""
        self.logger.log_summary(line, **facts)

    def measure_mfu(self, make_model: Callable[[], nn.Module]) -> None:
        """Measure the peak of the device; from here on, log lines and summary.json have the model FLOPs utilization.

        All ranks call this, because those that share a machine must measure at the same time. Rank 0 shows its own
        peak, and the mean of the utilization over all ranks relative to it.

        Args:
            make_model: returns the model, without activation checkpointing and not sharded.
        """
        from workshop.profiling.mfu import utilization

        options: Any = self.config  # has the flags of the lessons that measure this
        found = self.utilization = utilization(options, make_model, self.device)
        self.log_summary(
            f"peak of matrix products in {options.precision}: {found.peak_flops_per_second / 1e12:.3g} TFLOP/s; "
            f"a step of the model: {found.model_flops_per_step / 1e12:.3g} TFLOP",
            model_flops_per_step=found.model_flops_per_step,
            peak_flops_per_second=found.peak_flops_per_second,
        )

    def benchmark(
        self,
        loader: Loader,
        train: Callable[[Loader], object],
        no_sync: Callable[[], AbstractContextManager] | None = None,
    ) -> None:
        """Measure how fast loading and training are, alone and together; ``train`` trains on the loader it gets.

        With ``no_sync``, a context manager without communication, training is also measured without communication.
        """
        from workshop.profiling.throughput import benchmark

        config = self.config
        seconds = config.benchmark_seconds
        mfu = self._mfu if self.utilization else None
        benchmark(loader, train, self.device, config.loader, self.logger.directory, seconds, no_sync, mfu)

    @property
    def _logs_steps(self) -> bool:
        return self.rank == 0 and not self.config.benchmark

    def _log_step(self, loss: float) -> None:
        """Log the loss of the current step, the throughput, and the moving averages of load and compute time."""
        load, compute = self._timed.means()
        position, loader = self.position, self.position.loader
        assert loader is not None
        samples_per_second = loader.batch_sampler.global_batch_size / (load + compute)
        step, steps = position.step, len(loader)
        mfu = self._mfu(samples_per_second)
        self.logger.log(
            f"epoch {position.epoch}  step {step:{len(str(steps))}}/{steps}  loss {loss:.4f}  "
            f"{samples_per_second:,.0f} samples/s  load {1000 * load:.2f} ms  compute {1000 * compute:.2f} ms"
            f"{'' if mfu is None else f'  mfu {mfu:.1%}'}"
        )
        values = {"loss": loss, "samples_per_second": samples_per_second, "load_seconds": load, "mfu": mfu}
        self.logger.add_scalars("train", values | {"compute_seconds": compute}, position.finished_steps + step)

    def _mfu(self, samples_per_second: float) -> float | None:
        """Return the utilization at a throughput of all ranks together; None if `measure_mfu` was not called."""
        if self.utilization is None:
            return None
        return self.utilization.mfu(samples_per_second / self.logger.world_size)

    def _write_summary(self) -> None:
        position = self.position
        assert position.loader is not None
        monitor = self.monitor.summary() if self.monitor else None
        self.logger.write_summary(position.results, position.loader.batch_sampler.global_batch_size, monitor)
