"""Lesson 01's train.py for spectra: a 1-D network, missing pixels, a regression, whole batches.

    python experiments/spectra.py                      # redshifts of synthetic spectra: a minute on two CPU cores
    python experiments/spectra.py --file spectra.npz   # your own: arrays flux, good and target

`diff train.py experiments/spectra.py` shows what was replaced; the rest is the lesson's. The loss is in units of the
variance of the targets: 1 is what guessing their mean gives. You should see that in ten epochs it falls below 0.1, and
the mean error below a fifth of that of the guess. With a few hundred spectra, it takes more epochs: `--epochs 40
--lr_decay 0.95 --batch_size 32`.
"""

import math
import os
import time
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.profiler import record_function

from whole_batches import WholeBatches
from workshop.config import LessonFlags, OptimizerFlags, check_same_run, may_change, run_with_config
from workshop.errors import UserError, warn
from workshop.hardware import pick_device
from workshop.loaders import DistributedBatchSampler, Loader
from workshop.log import Log
from workshop.profiling import profile
from workshop.profiling.monitor import monitoring
from workshop.profiling.throughput import benchmark
from workshop.profiling.trace import tracing
from workshop.ranks import Ranks
from workshop.run import RunFolder
from workshop.seeds import seed_generators


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerFlags, LessonFlags):
    """The flags of this script, in addition to those of its groups."""

    file: Path | None = None
    """spectra.npz with the arrays flux (N, pixels), good (N, pixels) and target (N); default: synthetic spectra"""
    dataset: str = "spectra"
    """a name for the run"""
    loader: str = "whole_batches"
    """a name for the run"""
    model: str = "spectrum_cnn"
    """a name for the run"""
    num_workers: int = may_change(0)
    """always 0: whole batches are cut in this process"""
    epochs: int = may_change(10)
    """number of passes over the training data"""
    lr: float = 3e-3
    """learning rate, above 0"""
    lr_decay: float = 0.8
    """factor on the learning rate after each epoch"""


@dataclass
class Progress:
    """How far a run has come. It is saved with the weights."""

    epoch: int = 1
    """counted from 1"""
    step: int = 0
    """steps taken in this epoch"""
    loss_sum: float = 0.0
    """sum of the losses of this process in this epoch"""
    count: int = 0
    """number of losses in the sum"""


@dataclass
class Training:
    """All that a checkpoint holds, and what the training loop works on.

    There are no states of random generators in it, because all random numbers follow from seed, epoch and step.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    ranks: Ranks
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of the training depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),  # Adam, for example, keeps two averages for each weight
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.progress = Progress(**state["progress"])


PIXELS = 512
LINES = (60, 75, 120, 190, 290)
"""pixels of the absorption lines of a synthetic spectrum that is at rest"""


def synthetic_spectra(count: int = 6400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return flux, good pixels and redshifts, which move all lines of a logarithmic grid by the same pixels."""
    random = np.random.default_rng(0)
    redshift = random.uniform(0, 0.4, count)
    pixel = np.arange(PIXELS)
    flux = 1 + 0.3 * np.sin(pixel / 90 + random.uniform(0, 6, (count, 1)))
    for line in LINES:
        center = line + 500 * np.log1p(redshift)[:, None]
        flux -= random.uniform(0.2, 0.5, (count, 1)) * np.exp(-(((pixel - center) / 3) ** 2))
    flux += random.normal(0, 0.1, flux.shape)
    good = random.random(flux.shape) > 0.05  # cosmic rays, dead pixels
    flux[~good] = 1e3  # what a detector leaves there must not matter
    return flux, good, redshift


def read_spectra(file: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (N, 2, pixels), which are the flux and which pixels are good, and targets (N), in their own unit.

    Raises:
        UserError: an array is missing, they do not fit each other, or a target is not a number.
    """
    if file is None:
        flux, good, target = synthetic_spectra()
    else:
        if file.suffix != ".npz" or not file.is_file():
            raise UserError(f"--file {file}: expected a file of np.savez(file, flux=..., good=..., target=...)")
        with np.load(file) as arrays:
            if missing := {"flux", "good", "target"} - set(arrays):
                raise UserError(f"{file} has no array {min(missing)}: np.savez(file, flux=..., good=..., target=...)")
            flux, good, target = (arrays[name] for name in ("flux", "good", "target"))
    if flux.ndim != 2 or flux.shape != good.shape or target.shape != flux.shape[:1]:
        shapes = f"flux {flux.shape}, good {good.shape}, target {target.shape}"
        raise UserError(f"{shapes}: expected (N, pixels), (N, pixels) and (N,)")
    if wrong := np.count_nonzero(~np.isfinite(target)):
        raise UserError(f"{wrong} of {len(target)} targets are not finite: leave these spectra out")
    good = good.astype(bool) & np.isfinite(flux)
    if empty := np.count_nonzero(~good.any(axis=1)):
        raise UserError(f"{empty} spectra have no good pixel (in good, True means good): leave them out")
    # A missing pixel gets the mean of the others, and the second channel says that it is missing. NaN * 0 would be NaN.
    # Each spectrum is divided by its own spread, so it does not matter in which unit it comes (1e-17 erg/s/cm2/A).
    count = good.sum(1, keepdims=True)
    mean = np.where(good, flux, 0).sum(1, keepdims=True) / count
    spread = np.sqrt((np.where(good, flux - mean, 0) ** 2).sum(1, keepdims=True) / count)
    scaled = np.where(good, flux - mean, 0) / np.where(spread > 0, spread, 1)
    inputs = torch.from_numpy(np.stack([scaled, good], axis=1).astype(np.float32))
    return inputs, torch.from_numpy(target.astype(np.float32))


def add_noise(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch (N, 2, pixels) whose spectra have some more noise: augmentation of a whole batch in one call."""
    noise = 0.05 * torch.randn_like(batch[:, :1])
    return torch.cat([batch[:, :1] + noise * batch[:, 1:], batch[:, 1:]], dim=1)  # only where there is a pixel


def make_loader(config: Config, split: str, ranks: Ranks) -> WholeBatches:
    """Return the loader of the batches (inputs, targets) of a split, "train" or "val"."""
    inputs, targets = read_spectra(config.file)
    training = split == "train"
    # The same split in every run: a tenth is for the validation. If you have several spectra of a star, draw stars here
    # and take all of their spectra: otherwise the network has seen the stars that it is validated on.
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    chosen = order[len(inputs) // 10 :] if training else order[: len(inputs) // 10]
    chosen = chosen[: config.limit_train if training else config.limit_val]
    # All spectra lie on the device, where batches are cut: no batch is copied.
    inputs, targets = inputs[chosen].to(ranks.device), targets[chosen].to(ranks.device)
    sampler = DistributedBatchSampler(
        len(inputs),
        config.batch_size,
        rank=ranks.rank,
        num_replicas=ranks.world_size,
        shuffle=training,
        seed=config.seed,
    )
    return WholeBatches(inputs, targets, sampler, *([add_noise] if training else []))


class SpectrumCNN(nn.Module):
    """A network from spectra (N, 2, pixels) to targets (N), in their own unit.

    Inside, targets have mean 0 and spread 1: a network with outputs of order 1 would need thousands of steps to come to
    temperatures of 5,000 K. Both numbers are buffers, so a checkpoint has them.
    """

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, pixels: int, targets: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("center", targets.mean())
        self.register_buffer("scale", targets.std().clamp(min=1e-12))
        layers: list[nn.Module] = []
        length = pixels
        for channels, more in ((2, 32), (32, 64), (64, 64), (64, 64)):
            layers += [nn.Conv1d(channels, more, 7, stride=2, padding=3), nn.BatchNorm1d(more), nn.ReLU()]
            length = (length + 1) // 2
        # All positions are kept, because a redshift is a position. A batch norm here could not take a batch of one.
        layers += [nn.Flatten(), nn.Linear(64 * length, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        """Return predictions (N)."""
        return self.center + self.scale * self.layers(spectra).squeeze(1)  # (N, 1) minus targets (N) would be (N, N)


def loss_of(model: nn.Module, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the squared error in units of the variance of the targets: 1 is what guessing their mean gives."""
    return F.mse_loss(outputs / model.scale, targets / model.scale, reduction=reduction)


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the optimizer that was chosen, over the weights of ``model``."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.lr)
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), lr=config.lr)
    return torch.optim.Adam(model.parameters(), lr=config.lr)


def save_checkpoint(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, and keep the one before it as ``checkpoint.previous.pt``.

    Whenever the job is killed, one of the two files is complete: the new one is written under another name, and gets
    its own name when all of it is on the disk.
    """
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())  # until here, a part of it may only be in the memory of the operating system
    if file.exists():
        os.replace(file, file.with_suffix(".previous.pt"))
    os.replace(temporary, file)


def find_checkpoint(file: Path) -> Path | None:
    """Return the newest checkpoint that is complete and undamaged; None if there is none to continue from."""
    damaged: list[Path] = []
    for found in filter(Path.exists, (file, file.with_suffix(".previous.pt"))):
        try:
            # torch.save writes a zip archive with a checksum of each part. torch.load does not compare the checksums.
            if zipfile.ZipFile(found).testzip() is None:
                for bad in damaged:
                    warn(f"{bad} is damaged; continuing from {found}")
                    os.replace(bad, bad.with_suffix(".damaged"))  # otherwise the next save would keep it as "previous"
                return found
        except OSError:
            raise  # it cannot be read now; that does not mean that it is damaged
        except Exception:  # a damaged archive can raise many types of errors
            pass
        damaged.append(found)
    if damaged:
        raise UserError(f"{' and '.join(map(str, damaged))} damaged: delete them to start afresh")
    return None


CHECK_SECONDS = 2.5
"""longest time between two checks of the loss; each check makes the CPU wait for the device"""


def end_if_diverged(diverged: bool, progress: Progress) -> None:
    """End the run if the loss has become infinite or "not a number", so that no such weights are saved."""
    if diverged:
        early = progress.epoch == 1 and progress.step <= 100
        cause = ""
        if early:
            cause = ", or look for nan in the data, or for a tensor that was never initialized (to_empty, buffers)"
        raise UserError(
            f"the loss is not finite at step {progress.step} of epoch {progress.epoch}: try a lower --lr{cause}; "
            "earlier checkpoints are as they were"
        )


def save(training: Training, log: Log) -> None:
    """Save all that the rest of the training depends on."""
    end_if_diverged(not math.isfinite(training.progress.loss_sum), training.progress)
    state = training.state_dict() | {"settings": log.folder.settings}  # the flags, to refuse a run with other flags
    save_checkpoint(log.folder.path / "checkpoint.pt", state)


def resume(training: Training, log: Log) -> None:
    """Continue from the newest checkpoint in the run's folder, if there is one."""
    file = find_checkpoint(log.folder.path / "checkpoint.pt")
    if file is None:
        log.print(f"no checkpoint in {log.folder.path}: training begins at step 0")
        return
    state = torch.load(file, map_location="cpu", weights_only=True)
    check_same_run(state["settings"], log.folder.settings, file)
    training.load_state_dict(state)
    log.print(f"resumed from {file}: epoch {training.progress.epoch}, after step {training.progress.step}")


@profile
def train_one_epoch(config: Config, training: Training, loader: Loader, log: Log) -> float:
    """Train on every training sample once; return the mean loss.

    If the run was stopped within this epoch, ``training.progress`` says after which step.
    """
    model, optimizer, progress = training.model, training.optimizer, training.progress
    device = training.ranks.device
    model.train()
    loss_sum = torch.tensor(progress.loss_sum, device=device)
    checked = time.monotonic()
    log.start_epoch(loader)
    for inputs, targets in loader:
        log.start_step()  # the loop has waited for this batch until now
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        # Dropout's random numbers follow from the step, so a resumed run gets the same as one that was not stopped.
        seed_generators(device, config.seed, progress.epoch, progress.step)
        optimizer.zero_grad()
        with record_function("forward"):  # the name of this part of the step in profilers
            outputs = model(inputs)
            loss = loss_of(model, outputs, targets)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        progress.count += len(targets)
        progress.step += 1
        log_now = progress.step % config.log_interval == 0
        if log_now or time.monotonic() - checked > CHECK_SECONDS:
            checked = time.monotonic()
            value = loss.item()  # here, every --log_interval steps or some seconds, the CPU waits for the device
            end_if_diverged(not math.isfinite(value), progress)
        if log_now:
            log.log_step(progress, value)
        if config.save_interval and progress.step % config.save_interval == 0:
            progress.loss_sum = loss_sum.item()
            save(training, log)
        log.end_step()
    progress.loss_sum = loss_sum.item()
    end_if_diverged(not math.isfinite(progress.loss_sum), progress)
    return progress.loss_sum / progress.count


@torch.inference_mode()
def evaluate(config: Config, training: Training, loader: Loader) -> tuple[float, float]:
    """Return the mean loss and the mean absolute error over the validation samples."""
    model, device = training.model, training.ranks.device
    model.eval()
    loss_sum = torch.zeros((), device=device)
    error = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        outputs = model(inputs)
        loss_sum += loss_of(model, outputs, targets, "sum")
        error += (outputs - targets).abs().sum()
    return loss_sum.item() / len(loader.dataset), error.item() / len(loader.dataset)


def main(config: Config) -> None:
    """Train on the device of this machine."""
    device = pick_device()  # torch.device("cuda") if there is a GPU, otherwise torch.device("cpu")
    train(config, Ranks(device=device))  # this process is the only one


def train(config: Config, ranks: Ranks) -> None:
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each."""
    torch.manual_seed(config.seed)
    train_loader = make_loader(config, "train", ranks)
    val_loader = make_loader(config, "val", ranks)
    model = SpectrumCNN(train_loader.dataset.shape[2], train_loader.targets).to(ranks.device)
    optimizer = make_optimizer(config, model)
    scheduler = StepLR(optimizer, step_size=1, gamma=config.lr_decay)
    training = Training(model, optimizer, scheduler, ranks)

    with RunFolder(config, ranks) as folder, Log(folder) as log, tracing(log), monitoring(log):
        if config.benchmark:  # loading alone (IO), training alone (SYNTHETIC), and both together (FULL)

            def train_on(batches: Loader) -> None:
                train_one_epoch(config, replace(training, progress=Progress()), batches, log)

            benchmark(log, train_loader, train_on)
            return
        if config.resume:
            resume(training, log)
        if training.progress.epoch > config.epochs:
            log.print(f"nothing is left to do: --epochs is {config.epochs}")
        for epoch in range(training.progress.epoch, config.epochs + 1):
            # A new order of the samples; in a run that was stopped within the epoch, without those it has trained on.
            train_loader.batch_sampler.set_epoch(epoch, start_step=training.progress.step)
            samples = max(0, len(train_loader.dataset) - training.progress.step * config.batch_size)
            started = time.perf_counter()
            train_loss = train_one_epoch(config, training, train_loader, log)
            trained = time.perf_counter()
            val_loss, val_error = evaluate(config, training, val_loader)
            end_if_diverged(not math.isfinite(val_loss), training.progress)
            log.log_epoch(
                epoch,
                train_loss=train_loss,
                val_loss=val_loss,
                lr=scheduler.get_last_lr()[0],
                samples=samples,
                seconds=trained - started,
                val_seconds=time.perf_counter() - trained,
            )
            guess = (val_loader.targets - train_loader.targets.mean()).abs().mean().item()
            line = f"mean error {val_error:.4g} (guessing the mean: {guess:.4g})"
            log.log_summary(line, val_mean_error=val_error, mean_error_of_guess=guess)
            scheduler.step()
            training.progress = Progress(epoch + 1)
            save(training, log)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
