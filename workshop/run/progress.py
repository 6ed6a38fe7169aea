"""Where a run is: it counts steps and epochs, saves them, goes on from there, and stops when told to or when lost."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workshop.config import TrainConfig
from workshop.distributed.agreement import Agreement
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError
from workshop.loaders import Loader
from workshop.run.checkpoint import (
    Stateful,
    find_checkpoint,
    identity,
    position,
    random_state,
    read_checkpoint,
    refuse_misfit,
    save_checkpoint,
    set_random_state,
)
from workshop.signals import StopSignals
from workshop.step.optimizers import restore_optimizer

LONGEST_PACE = 1024
"""at most so many steps from one agreement of the ranks to the next; losses are kept on the device until then"""


class Progress:
    """The position of a run that may end at any moment and goes on as if it had not.

    About once a second the ranks agree on whether one of them was told to stop or had a loss that is not finite. In
    the steps between they exchange nothing for it, and nothing waits for the device.

    It saves to the file ``checkpoint`` and goes on from there; ``log`` is given lines for the user.
    """

    def __init__(
        self, config: TrainConfig, device: torch.device, ranks: Ranks, checkpoint: Path, log: Callable[[str], None]
    ) -> None:
        self.config = config
        self.device = device
        self.ranks = ranks
        self.checkpoint = checkpoint
        self.log = log
        self.epochs: list[dict[str, Any]] = []
        self.steps = 0
        """steps taken in the epochs before"""
        self.step = 0
        """steps taken in the epoch under way"""
        self.loader: Loader | None = None
        self._resumed: dict[str, Any] = {}  # `_size` of the run that this one goes on from
        self._parts: dict[str, Stateful] = {}
        self.stop = StopSignals()
        self.agreement = Agreement(ranks)
        self._pace = 1
        self._losses = torch.zeros(LONGEST_PACE, device=device)
        self._unseen = 0
        """how many losses were put there since the last agreement"""
        self._start_step, self._start_loss = 0, 0.0
        self.first_step_seconds: float | None = None
        """how long the run's first step took, with its batch: libraries, kernels and compilers are loaded in it"""
        self.seconds_before = 0.0
        """spent on the epoch under way before the run was resumed in the middle of it"""
        self._loss_sum = torch.zeros(())
        self._epoch_started = self._agreed = time.perf_counter()

    def resume(self, **parts: Stateful) -> int:
        """Return the epoch to begin with, counted from 1; with ``--resume true``, load the checkpoint into ``parts``.

        From then on these parts are saved. If the run was stopped in the middle of an epoch, that epoch's `loss_sum`
        and loader start where it was.

        Rank 0 finds out which checkpoint is good. Then each rank reads that file itself: sent to all ranks, the states
        would need several times their size of memory.

        Raises UserError: the checkpoints are damaged, or of a run that this one cannot continue, or a rank cannot read
        them.
        """
        self._parts = parts
        if self.config.resume:
            good = self.agreement.on_main(lambda: find_checkpoint(self.checkpoint))
            saved = self.agreement.on_each(lambda: read_checkpoint(good) if good else None)
            try:
                if good:
                    self._restore(saved, good.source)
            except Exception as error:  # whatever a content that no such run writes happens to trip over
                if isinstance(error, UserError):
                    raise
                what = f"does not fit this run ({type(error).__name__}: {error}); choose another --run_dir"
                raise UserError(f"{self.checkpoint} {what}") from None
        return len(self.epochs) + 1

    def loss_sum(self) -> torch.Tensor:
        """Return the tensor () to which an epoch adds up its losses."""
        self._loss_sum = torch.full((), self._start_loss, device=self.device)
        self._start_loss = 0.0
        return self._loss_sum

    def begin_epoch(self, loader: Loader) -> None:
        """Have ``loader`` leave out the steps of the coming epoch that were taken before the run was stopped.

        Raise `UserError` if these are of other data.
        """
        self.loader = loader
        in_epoch = len(self.epochs) + 1 if self._start_step else None
        refuse_misfit(self.checkpoint, self._resumed, self._size(), in_epoch)
        self.step = loader.sampler.start_step = self._start_step
        self._start_step = self._unseen = 0
        self._agreed = time.perf_counter()
        self._epoch_started = self._agreed - self.seconds_before
        self._next_agreement = self.step + self._pace

    def count_step(self, loss: torch.Tensor) -> None:
        """Count a training step and keep its loss for the next agreement."""
        self._losses[self._unseen % LONGEST_PACE] = loss.detach()
        self._unseen += 1
        self.step += 1

    def save_or_stop(self) -> None:
        """Save if it is time to, stop if told to; the last step of an epoch leaves that to `save`, which follows.

        Raises UserError: the loss is not finite. SystemExit: stopped, with status 0.
        """
        interval = self.config.save_interval
        saving = interval is not None and self.step % interval == 0
        asked = self.step == self._next_agreement or (self.ranks.world_size == 1 and self.stop.received)
        if (saving or asked) and self.step < len(self.loader) and not self.config.benchmark:
            told = self.check_losses()
            if saving or told:
                self._write()
            if told:
                self._leave(told)

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Count the epoch under way as done."""
        self.epochs.append(record)
        self.steps += len(self.loader)
        self.step = 0
        self.seconds_before = 0.0

    def save(self) -> None:
        """Write a checkpoint after an epoch; stop if told to and if there is an epoch left."""
        told = self.check_losses()
        self._write()
        if told and len(self.epochs) < self.config.epochs:
            self._leave(told)

    def check_losses(self) -> int:
        """Return the number of the signal by which any rank was told to stop, else 0; on all ranks the same.

        Raises UserError: on some rank the loss is not finite.
        """
        world_size = self.ranks.world_size
        finite = self._losses[: self._unseen].isfinite().tolist()  # waits for the device
        first = self.step - self._unseen
        bad = (first + finite.index(False)) * world_size + self.ranks.rank if False in finite else math.inf
        now = time.perf_counter()
        pace = self._unseen / max(now - self._agreed, 1e-6)  # steps per second
        bad, told, pace = self.agreement.minimum([bad, -self.stop.received, pace])
        if bad < math.inf:
            step, rank = divmod(int(bad), world_size)
            raise UserError(
                f"the loss is not finite in step {step + 1} of epoch {len(self.epochs) + 1} on rank {rank}; "
                f"{self._last_good()} Try a lower --lr"
            )
        if self._unseen and self.step < len(self.loader):  # else the time is not that of training alone
            self._pace = max(1, min(round(pace), 2 * self._pace, LONGEST_PACE))
            self.first_step_seconds = self.first_step_seconds or now - self._agreed
        self._agreed, self._unseen = now, 0
        self._next_agreement = self.step + self._pace
        return int(-told)

    def _last_good(self) -> str:
        found = self.checkpoint.exists()
        return f"the last good checkpoint is {self.checkpoint}." if found else "there is no checkpoint yet."

    def _position(self) -> str:
        return position(len(self.epochs) + 1, self.step)

    def _leave(self, told: int) -> None:
        """End the process after a checkpoint was written; let the Slurm job know if it is to go on by itself."""
        name = signal.Signals(told).name
        self.log(f"told to stop by {name}: saved {self._position()}; --resume true goes on from there")
        requeue = os.environ.get("WORKSHOP_REQUEUE_FILE")
        if told == signal.SIGUSR1 and requeue and self.ranks.is_main:
            Path(requeue).touch()
        raise SystemExit(0)

    def _write(self) -> None:
        """Write checkpoint.pt; raise `UserError` on all ranks if that fails or the weights are not finite."""
        mine = {"loss_sum": self._loss_sum.item(), "random": random_state(self.device)}
        per_rank = self.agreement.gather(mine)
        self.agreement.on_main(lambda: self._write_for_all(per_rank))

    def _write_for_all(self, per_rank: list[dict[str, Any]]) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        for name, tensor in state.get("model", {}).items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise UserError(
                    f"{name} of the model is not finite {self._position()} on rank {self.ranks.rank}; "
                    f"{self._last_good()} Try a lower --lr"
                )
        state["run"] = {
            "is": identity(self.config, self.ranks, self._parts),
            "size": self._size(),
            "lr": self.config.lr,
            "epochs": self.epochs,
            "steps": self.steps,
            "step": self.step,
            "seconds": time.perf_counter() - self._epoch_started,
            "ranks": per_rank,
        }
        save_checkpoint(self.checkpoint, state)

    def _size(self) -> dict[str, int]:
        return {"train_samples": self.loader.sampler.samples, "steps_per_epoch": len(self.loader)}

    def _restore(self, saved: dict[str, Any], source: str) -> None:
        run = saved.pop("run")  # of a tensor, indexing would warn first
        epoch, step, wrote = len(run["epochs"]) + 1, run["step"], len(run["ranks"])
        mine = identity(self.config, self.ranks, self._parts)
        refuse_misfit(self.checkpoint, run["is"], mine, epoch if step else None)
        saved.get("scheduler", {}).pop("base_lrs", None)  # they follow from this run's --lr
        for name, part in self._parts.items():
            if name == "optimizer":
                restore_optimizer(part, saved[name], self.config.lr / run["lr"])
            else:
                part.load_state_dict(saved[name])
        self.epochs, self.steps, self._resumed = run["epochs"], run["steps"], run.get("size", {})
        if self.ranks.rank < wrote:  # others are new to this run, and keep what their seed gave them
            mine = run["ranks"][self.ranks.rank]
            set_random_state(mine["random"], self.device)
            if step:
                self._start_step, self._start_loss, self.seconds_before = step, mine["loss_sum"], run["seconds"]
        others = "" if wrote == self.ranks.world_size else f", written by {wrote} rank(s)"
        lr = "" if run["lr"] == self.config.lr else f", with --lr {self.config.lr} in place of {run['lr']}"
        self.log(f"resumed from {source} {position(epoch, step)}{others}{lr}")
