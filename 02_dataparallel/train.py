"""Lesson 02: lesson 01 on all GPUs of one machine, with one process and nn.DataParallel.

    python train.py              # trains
    kernprof -lv train.py        # trains, then shows the time spent on each line of train_one_epoch

You should see a line that says how many GPUs are used. With one GPU or none, it says that DataParallel does nothing
there, and the losses are those of lesson 01.
"""

import math
import os
import time
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workshop.config import ImageFlags, LessonFlags, OptimizerFlags, check_same_run, run_with_config
from workshop.errors import UserError, warn
from workshop.hardware import pick_device
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader
from workshop.log import Log
from workshop.models import build_model
from workshop.profiling import profile
from workshop.profiling.monitor import monitoring
from workshop.profiling.throughput import benchmark
from workshop.profiling.trace import tracing
from workshop.ranks import Ranks
from workshop.run import RunFolder
from workshop.seeds import seed_generators


@dataclass(frozen=True, kw_only=True)
class Config(ImageFlags, OptimizerFlags, LessonFlags):
    """The flags of this lesson, in addition to those of its groups."""

    dataset: Literal["mnist", "cifar10"] = "mnist"
    """data set to train on"""
    lr_decay: float = 0.7
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

    model: nn.DataParallel
    optimizer: Optimizer
    scheduler: LRScheduler
    ranks: Ranks
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of the training depends on."""
        return {
            "model": self.model.module.state_dict(),  # DataParallel puts "module." before the name of every weight
            "optimizer": self.optimizer.state_dict(),  # Adam, for example, keeps two averages for each weight
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.progress = Progress(**state["progress"])


def make_loader(config: Config, split: str, ranks: Ranks) -> Loader:
    """Return the loader of the batches (inputs, targets) of a split, "train" or "val"."""
    if config.loader != "map":
        return build_loader(config, split, ranks)  # shards, memory, device or dali: loaders.md compares them
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    dataset = ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)
    return DataLoader(
        dataset,
        # Like DataLoader's own shuffle=True, but the order follows from seed and epoch, so that a run can be resumed.
        batch_sampler=DistributedBatchSampler(len(dataset), config.batch_size, shuffle=training, seed=config.seed),
        # Processes that prepare batches while the model trains; with 0, the training process loads each batch itself.
        num_workers=config.num_workers,
        # Put batches into page-locked memory: only from there can a GPU copy while the CPU goes on.
        pin_memory=config.pin_memory and ranks.device.type == "cuda",
        # Keep the workers from one epoch to the next: starting them takes seconds.
        persistent_workers=config.persistent_workers and config.num_workers > 0,
        # Batches that each worker prepares ahead: they bridge the time of a slow one.
        prefetch_factor=config.prefetch_factor if config.num_workers > 0 else None,
    )


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
            loss = F.cross_entropy(outputs, targets)
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
    """Return the mean loss and the share of correct answers over the validation samples."""
    model, device = training.model.module, training.ranks.device
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        outputs = model(inputs)
        loss_sum += F.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(dim=1) == targets).sum()
    return loss_sum.item() / len(loader.dataset), correct.item() / len(loader.dataset)


def main(config: Config) -> None:
    """Train on the device of this machine."""
    device = pick_device()  # torch.device("cuda") if there is a GPU, otherwise torch.device("cpu")
    train(config, Ranks(device=device))  # this process is the only one


def train(config: Config, ranks: Ranks) -> None:
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each."""
    torch.manual_seed(config.seed)
    train_loader = make_loader(config, "train", ranks)
    val_loader = make_loader(config, "val", ranks)
    model = build_model(config.model, config.dataset, dropout=config.dropout).to(ranks.device)
    # In each step it copies the model to all GPUs, splits the batch, and collects the outputs.
    replicas = nn.DataParallel(model)
    if len(replicas.device_ids) < 2:
        print(f"DataParallel does nothing here: it found {len(replicas.device_ids)} GPU(s); training on one device")
    else:
        print(f"DataParallel uses {len(replicas.device_ids)} GPUs")
    optimizer = make_optimizer(config, model)
    scheduler = StepLR(optimizer, step_size=1, gamma=config.lr_decay)
    training = Training(replicas, optimizer, scheduler, ranks)

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
            val_loss, val_accuracy = evaluate(config, training, val_loader)
            end_if_diverged(not math.isfinite(val_loss), training.progress)
            log.log_epoch(
                epoch,
                train_loss=train_loss,
                val_loss=val_loss,
                val_accuracy=val_accuracy,
                lr=scheduler.get_last_lr()[0],
                samples=samples,
                seconds=trained - started,
                val_seconds=time.perf_counter() - trained,
            )
            scheduler.step()
            training.progress = Progress(epoch + 1)
            save(training, log)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
