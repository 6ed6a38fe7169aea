"""Where a run is: it counts epochs and steps, saves checkpoints, continues from them, and stops when a signal asks."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from workshop.config import TrainConfig
from workshop.errors import UserError
from workshop.loaders.sampler import Loader
from workshop.run.checkpoint import (
    check_compatible,
    copied,
    difference,
    find_checkpoint,
    fingerprint,
    position,
    previous,
    random_state,
    read_checkpoint,
    save_checkpoint,
    set_random_state,
)
from workshop.run.control_group import ControlGroup
from workshop.signals import StopSignals

if TYPE_CHECKING:
    from workshop.run.sharded import Loading, Saving, ShardedCheckpoints

T = TypeVar("T")

MAX_CHECK_INTERVAL = 1024
"""at most this number of steps between two checks of all ranks; the losses stay on the device until then"""


class Position:
    """The position of a run that may end at any moment and continue as if it had not.

    About once a second the ranks check together whether one of them got a signal to stop, or a loss that is not finite.
    In the steps between two checks they exchange nothing for it, and the CPU does not wait for the device.

    Args:
        config: of the lesson.
        device: that trains.
        rank: of this process.
        world_size: number of ranks.
        checkpoint: file to save to and to continue from; sharded checkpoints are in a folder beside it.
        log: prints a line for the user.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        rank: int,
        world_size: int,
        checkpoint: Path,
        log: Callable[[str], None],
    ) -> None:
        self.config = config
        self.device = device
        self.rank, self.world_size = rank, world_size
        sharded = getattr(config, "checkpoint_form", "whole") == "sharded"  # only lesson 05 has this flag
        forms = checkpoint, checkpoint.with_suffix(".sharded")
        self.checkpoint, self._other_form = forms[::-1] if sharded else forms
        self._sharded: ShardedCheckpoints | None = None
        self.log = log
        self.stop = StopSignals()
        self.control = ControlGroup(rank, world_size)
        self.loader: Loader | None = None
        self.results: list[dict[str, Any]] = []
        """of the finished epochs; only rank 0 has those of this run"""
        self.finished_epochs = 0
        self.finished_steps = 0
        """steps taken in the finished epochs"""
        self.step = 0
        """steps taken in the current epoch"""
        self.in_epoch = False
        self.partial_loss_sum = 0.0
        """sum of the losses in the current epoch before the run was stopped within it"""
        self.seconds_before = 0.0
        """time spent on the current epoch before the run was stopped within it"""
        self.earlier_seconds = 0.0
        """the same of the epoch that was finished last"""
        self.first_step_seconds: float | None = None
        """duration of the first step of the run with its batch, in which libraries, kernels and compilers are loaded"""
        self._saved_size: dict[str, int] = {}  # `_size` of the run that this one continues
        self._start_step = 0
        self._check_every = 1
        self._losses = torch.zeros(MAX_CHECK_INTERVAL, device=device)
        self._unchecked = 0  # number of losses since the last check
        self._stop_signal = 0
        self._epoch_started = self._last_check = time.perf_counter()

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between two epochs; counted from 1."""
        return self.finished_epochs + 1

    def load(self, matching: dict[str, Any]) -> dict[str, Any] | None:
        """Return the parts of the latest good checkpoint, and set this position to where it was saved; None without it.

        Rank 0 finds out which file is good. Then each rank reads that file itself, because sending the states to all
        ranks would need several times their size of memory.

        Args:
            matching: what this run would save; a checkpoint must have the same keys and shapes.

        Raises:
            UserError: the checkpoints are damaged, or this run cannot continue from them, or a rank cannot read them.
        """
        good = self.control.on_rank0(lambda: self._or_other_form(find_checkpoint(self.checkpoint)))
        if good is None:
            return None
        saved = self.control.on_each(lambda: read_checkpoint(good))
        with self._refusing_unknown_content():
            run = saved.pop("run")
            self._accept(run, saved, matching)
            if self.config.lr != run["lr"]:  # the user asks for another learning rate, on the same schedule
                optimizer = saved.get("optimizer", {"param_groups": []})
                self._scale_lr(optimizer, saved.get("scheduler", {}), self.config.lr / run["lr"])
            on_gpu = self.device.type != "cpu"
            saved |= {name: copied(part, numbers_only=on_gpu) for name, part in saved.items() if name != "model"}
        self._log_resumed(run, good.source)
        return saved

    @contextmanager
    def load_sharded(self, matching: dict[str, Any]) -> "Iterator[Loading | None]":
        """Do the same as `load` for a sharded checkpoint, whose tensors the caller reads within this context.

        Raises:
            UserError: as `load`.
        """
        from workshop.run.sharded import Loading

        shards = self._shards()
        found = shards.find()
        self.control.on_rank0(lambda: self._or_other_form(found and True))
        if found is None:
            yield None
            return
        folder, source, saved = found
        with self._refusing_unknown_content():
            run = saved.pop("run")
            self._accept(run, saved.pop("structure") | saved, matching)
            factor = self.config.lr / run["lr"]
            if factor != 1:
                self._scale_lr({"param_groups": []}, saved.get("scheduler", {}), factor)
        with shards.reading(folder):
            yield Loading(folder, shards.group, saved, factor, self.config.lr)
        self._log_resumed(run, source)

    def begin_epoch(self, loader: Loader) -> None:
        """Start counting the steps of an epoch; ``loader`` leaves out those that were taken before the run was stopped.

        Raises:
            UserError: these steps were taken with other data.
        """
        self.loader = loader
        in_epoch = self.epoch if self._start_step else None
        check_compatible(self.checkpoint, self._saved_size, self._size(), in_epoch)
        self.step = loader.batch_sampler.start_step = self._start_step
        self._start_step = self._unchecked = 0
        self._last_check = time.perf_counter()
        self._epoch_started = self._last_check - self.seconds_before
        self._next_check = self.step + self._check_every
        self.in_epoch = True

    def count_step(self, loss: torch.Tensor) -> None:
        """Count a training step, and keep its loss on the device until the next check."""
        self._losses[self._unchecked % MAX_CHECK_INTERVAL] = loss.detach()
        self._unchecked += 1
        self.step += 1

    def should_save(self) -> bool:
        """Return whether a checkpoint is to be written after the current step; the same on all ranks.

        The answer is False after the last step of an epoch, because the checkpoint of the whole epoch follows.

        Raises:
            UserError: on some rank the loss is not finite.
        """
        assert self.loader is not None
        interval = self.config.save_interval
        due = interval is not None and self.step % interval == 0
        check = self.step == self._next_check or (self.world_size == 1 and self.stop.received)
        if self.config.benchmark or self.step >= len(self.loader) or not (due or check):
            return False
        self.check_losses()
        return due or self._stop_signal > 0

    def end_epoch(self) -> None:
        """Count the current epoch as finished.

        Raises:
            UserError: on some rank the loss is not finite.
        """
        assert self.loader is not None
        self.check_losses()
        self.finished_epochs += 1
        self.finished_steps += len(self.loader)
        self.step, self.partial_loss_sum = 0, 0.0
        self.earlier_seconds, self.seconds_before = self.seconds_before, 0.0
        self.in_epoch = False

    def save(self, state: dict[str, Any], loss_sum: torch.Tensor | None) -> None:
        """Write a checkpoint; then end the process if a signal has asked for it and an epoch is left.

        All ranks call this. Each of them adds its random state and its ``loss_sum``; rank 0 writes the file.

        Raises:
            UserError: the file cannot be written, or the weights are not finite; on all ranks.
            SystemExit: stopped, with status 0.
        """
        per_rank = self._states_of_ranks(loss_sum)
        self.control.on_rank0(lambda: self._write(state, per_rank))
        if self._stops:
            self._exit()

    @contextmanager
    def save_sharded(
        self, sharded: dict[str, Any], state: dict[str, Any], loss_sum: torch.Tensor | None
    ) -> "Iterator[Saving]":
        """Make a folder for a checkpoint, to which the caller writes within this context; then the same as `save`.

        Raises:
            UserError: the folder cannot be written, also if this happened while the last one was saved in a thread, or
                the weights are not finite; on all ranks.
            SystemExit: stopped, with status 0.
        """
        from workshop.run.sharded import first_not_finite, structure

        shards = self._shards()
        shards.wait()
        per_rank = self._states_of_ranks(loss_sum)

        def check_weights() -> None:
            if (name := first_not_finite(sharded.get("model", {}))) is not None:
                raise UserError(self._not_finite(name))

        self.control.on_each(check_weights)
        run = self._run_state(sharded | state, per_rank)
        shards.begin(state | {"run": run, "structure": structure(sharded)})
        with shards.writing() as saving:
            yield saving
        if saving.future is None:
            shards.complete()
        else:
            shards.complete_later(saving.future)
        if self._stops:
            shards.wait()
            self._exit()

    def wait_for_save(self, error: BaseException | None) -> None:
        """Wait until a checkpoint that is saved in a thread is complete; called at the end of the run.

        Args:
            error: what ends the run; None if nothing does. After a crash other ranks may be gone, so it does not wait.

        Raises:
            UserError: the checkpoint cannot be written; not if the run ends with an error anyway.
        """
        if self._sharded is not None:
            if error is None:
                self._sharded.wait()
            elif isinstance(error, UserError | SystemExit):
                with suppress(UserError):
                    self._sharded.wait()

    def check_losses(self) -> None:
        """Find out on all ranks together whether a loss was not finite, and whether a signal has asked to stop.

        Raises:
            UserError: on some rank the loss is not finite.
        """
        finite = self._losses[: self._unchecked].isfinite().tolist()  # here the CPU waits for the device
        first = self.step - self._unchecked
        bad = (first + finite.index(False)) * self.world_size + self.rank if False in finite else math.inf
        now = time.perf_counter()
        pace = self._unchecked / max(now - self._last_check, 1e-6)  # steps per second
        bad, minus_signal, pace = self.control.minimum([bad, -self.stop.received, pace])
        if bad < math.inf:
            step, rank = divmod(int(bad), self.world_size)
            raise UserError(
                f"the loss is not finite in step {step + 1} of epoch {self.epoch} on rank {rank}; "
                f"{self._last_good()} Try a lower --lr"
            )
        if self._unchecked and self.loader is not None and self.step < len(self.loader):  # only training was timed
            self._check_every = max(1, min(round(pace), 2 * self._check_every, MAX_CHECK_INTERVAL))
            self.first_step_seconds = self.first_step_seconds or now - self._last_check
        self._last_check, self._unchecked = now, 0
        self._next_check = self.step + self._check_every
        self._stop_signal = int(-minus_signal)

    def _last_good(self) -> str:
        found = self.checkpoint.exists()
        return f"the last good checkpoint is {self.checkpoint}." if found else "there is no checkpoint yet."

    def _where(self) -> str:
        return position(self.epoch, self.step)

    def _exit(self) -> None:
        """End the process after a checkpoint was written; ask the Slurm job to requeue itself if that is wanted."""
        name = signal.Signals(self._stop_signal).name
        self.log(f"stopped by {name}: saved {self._where()}; --resume true continues from there")
        requeue = os.environ.get("WORKSHOP_REQUEUE_FILE")
        if self._stop_signal == signal.SIGUSR1 and requeue and self.rank == 0:
            Path(requeue).touch()
        raise SystemExit(0)

    @property
    def _stops(self) -> bool:
        """Whether a signal has asked to stop, and something is left to do."""
        return self._stop_signal > 0 and (self.in_epoch or self.finished_epochs < self.config.epochs)

    def _states_of_ranks(self, loss_sum: torch.Tensor | None) -> list[dict[str, Any]]:
        """Return, on rank 0, the random state and the sum of the losses of each rank."""
        if not self.in_epoch:
            self.check_losses()
        mine = {"loss_sum": 0.0 if loss_sum is None else loss_sum.item(), "random": random_state(self.device)}
        return self.control.gather(mine)

    def _not_finite(self, name: str) -> str:
        where = f"{self._where()} on rank {self.rank}"
        return f"{name} of the model is not finite {where}; {self._last_good()} Try a lower --lr"

    def _write(self, state: dict[str, Any], per_rank: list[dict[str, Any]]) -> None:
        for name, tensor in state.get("model", {}).items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise UserError(self._not_finite(name))
        save_checkpoint(self.checkpoint, state | {"run": self._run_state(state, per_rank)})

    def _run_state(self, parts: dict[str, Any], per_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what `_accept` and `_log_resumed` need; ``parts`` are all that the checkpoint holds."""
        return {
            "is": self._fingerprint(parts),
            "size": self._size(),
            "lr": self.config.lr,
            "epochs": self.results,
            "finished_epochs": self.finished_epochs,
            "steps": self.finished_steps,
            "step": self.step,
            "seconds": time.perf_counter() - self._epoch_started,
            "ranks": per_rank,
        }

    def _shards(self) -> "ShardedCheckpoints":
        """Return what reads and writes sharded checkpoints; at the first call all ranks connect to each other."""
        from workshop.run.sharded import ShardedCheckpoints  # imported only by runs that have sharded checkpoints

        if self._sharded is None:
            self._sharded = ShardedCheckpoints(self.checkpoint, self.rank, self.world_size)
        return self._sharded

    def _or_other_form(self, found: T) -> T:
        """Return ``found``; raise `UserError` if it is None, but there is a checkpoint of the other form."""
        other = self._other_form if self._other_form.exists() else previous(self._other_form)
        if found is None and other.exists():
            form = other.suffix.removeprefix(".").replace("pt", "whole")
            flag = f"lesson 05 continues from it with --checkpoint_form {form}"
            raise UserError(f"{other} is a checkpoint of another form: {flag}; or give another --run_dir")
        return found

    @contextmanager
    def _refusing_unknown_content(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # a content that no run of the workshop has written can raise any type of error
            what = f"does not fit this run: {type(error).__name__}: {error}; choose another --run_dir"
            raise UserError(f"{self.checkpoint} {what}") from None

    def _accept(self, run: dict[str, Any], saved: dict[str, Any], matching: dict[str, Any]) -> None:
        """Continue from the position ``run`` of a checkpoint; raise `UserError` if it does not fit this run."""
        self.finished_epochs = run["finished_epochs"]
        in_epoch = self.epoch if run["step"] else None
        check_compatible(self.checkpoint, run["is"], self._fingerprint(matching), in_epoch)
        if problem := difference(saved, matching):
            raise UserError(f"{self.checkpoint} does not fit this run: {problem}; choose another --run_dir")
        self._restore(run)

    def _log_resumed(self, run: dict[str, Any], source: str) -> None:
        wrote = len(run["ranks"])
        others = "" if wrote == self.world_size else f", written by {wrote} rank(s)"
        lr = "" if run["lr"] == self.config.lr else f", with --lr {self.config.lr} in place of {run['lr']}"
        self.log(f"resumed from {source} {position(self.epoch, run['step'])}{others}{lr}")

    def _fingerprint(self, parts: dict[str, Any]) -> dict[str, Any]:
        return fingerprint(self.config, self.world_size, self.config.batch_size * self.world_size, parts)

    def _size(self) -> dict[str, int]:
        assert self.loader is not None
        return {"train_samples": len(self.loader.dataset), "steps_per_epoch": len(self.loader)}

    def _restore(self, run: dict[str, Any]) -> None:
        """Take over the position and this rank's random state from what `_run_state` has put into a checkpoint."""
        self.results, self.finished_steps, self._saved_size = run["epochs"], run["steps"], run.get("size", {})
        if self.rank < len(run["ranks"]):  # the others are new to this run, and keep the random numbers of their seed
            own = run["ranks"][self.rank]
            set_random_state(own["random"], self.device)
            if step := run["step"]:
                self._start_step, self.partial_loss_sum, self.seconds_before = step, own["loss_sum"], run["seconds"]

    def _scale_lr(self, optimizer: dict[str, Any], scheduler: dict[str, Any], factor: float) -> None:
        """Multiply the learning rates in the states of an optimizer and its schedule, which starts from --lr."""
        scheduler.pop("base_lrs", None)  # the schedule of this run has those of its own --lr
        scheduler["_last_lr"] = [lr * factor for lr in scheduler.get("_last_lr", [])]
        for group in optimizer["param_groups"]:
            group["lr"] *= factor
            group["initial_lr"] = self.config.lr
