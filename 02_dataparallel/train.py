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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workshop.config import TrainConfig, check_same_run, run_with_config, settings
from workshop.errors import UserError, warn
from workshop.hardware import pick_device
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader
from workshop.log import RunLogger
from workshop.models import build_model
from workshop.profiling import profile
from workshop.profiling.throughput import benchmark


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, in addition to those that all lessons share."""

    lr_decay: float = 0.7
    """factor on the learning rate after each epoch"""


def make_loader(config: Config, split: str, device: torch.device) -> Loader:
    """Return what gives the batches (inputs, targets) of a split, "train" or "val"."""
    if config.loader != "map":
        return build_loader(config, split, device)  # shards, memory, device or dali: loaders.md compares them
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
        pin_memory=config.pin_memory and device.type == "cuda",
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


def end_if_diverged(loss: float, progress: dict[str, Any]) -> None:
    """End the run if the loss has become infinite or "not a number", so that no such weights are saved."""
    if not math.isfinite(loss):
        where = f"step {progress['step']} of epoch {progress['epoch']}"
        raise UserError(f"the loss is not finite at {where}: try a lower --lr; earlier checkpoints are as they were")


def state_of(
    config: Config, replicas: nn.DataParallel, optimizer: Optimizer, scheduler: LRScheduler, progress: dict[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint holds: all that the rest of the training depends on.

    There are no states of random generators in it, because all random numbers follow from seed, epoch and step.
    """
    model = replicas.module  # the model itself: DataParallel puts "module." before the name of every weight
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),  # Adam, for example, keeps two averages for each weight
        "scheduler": scheduler.state_dict(),
        "progress": progress,
        "settings": settings(config, config.batch_size),  # the flags, to refuse a run that has others
    }


@profile
def train_one_epoch(
    config: Config,
    replicas: nn.DataParallel,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    log: RunLogger,
    progress: dict[str, Any],
) -> float:
    """Train on every training sample once; return the mean loss.

    ``progress`` says where the run is: the epoch, the steps taken in it, and the sum of their losses. The latter two
    are 0 unless the run was stopped within this epoch.
    """
    replicas.train()
    loss_sum = torch.tensor(progress["loss_sum"], device=device)
    for inputs, targets in log.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        # Dropout's random numbers follow from the step, so a resumed run gets the same as one that was not stopped.
        torch.manual_seed(hash((config.seed, progress["epoch"], progress["step"])))
        optimizer.zero_grad()
        with record_function("forward"):  # the name of this part of the step in profilers
            outputs = replicas(inputs)
            loss = F.cross_entropy(outputs, targets)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        progress["step"] += 1
        if progress["step"] % config.log_interval == 0:
            value = loss.item()  # here, every --log_interval steps, the CPU waits for the device
            end_if_diverged(value, progress)
            log.log_step(progress["epoch"], progress["step"], value)
        if config.save_interval and progress["step"] % config.save_interval == 0:
            progress["loss_sum"] = loss_sum.item()
            end_if_diverged(progress["loss_sum"], progress)
            save_checkpoint(log.run_dir / "checkpoint.pt", state_of(config, replicas, optimizer, scheduler, progress))
    end_if_diverged(loss_sum.item(), progress)
    return loss_sum.item() / len(loader.dataset)


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the share of correct answers over the validation samples."""
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
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each."""
    device = pick_device()  # torch.device("cuda") if there is a GPU, otherwise torch.device("cpu")
    torch.manual_seed(config.seed)
    train_loader = make_loader(config, "train", device)
    val_loader = make_loader(config, "val", device)
    model = build_model(config.model, config.dataset, dropout=config.dropout).to(device)
    # In each step it copies the model to all GPUs, splits the batch, and collects the outputs.
    replicas = nn.DataParallel(model)
    if len(replicas.device_ids) < 2:
        print(f"DataParallel does nothing here: it found {len(replicas.device_ids)} GPU(s); training on one device")
    else:
        print(f"DataParallel uses {len(replicas.device_ids)} GPUs")
    optimizer = make_optimizer(config, model)
    scheduler = StepLR(optimizer, step_size=1, gamma=config.lr_decay)
    progress: dict[str, Any] = {"epoch": 1, "step": 0, "loss_sum": 0.0}

    with RunLogger(config, device) as log:
        if config.benchmark:  # loading alone (IO), training alone (SYNTHETIC), and both together (FULL)

            def train_on(batches: Loader) -> None:
                train_one_epoch(config, replicas, batches, optimizer, scheduler, device, log, progress | {"step": 0})

            benchmark(train_loader, train_on, device, config.loader, log.run_dir, config.benchmark_seconds)
            return
        file = find_checkpoint(log.run_dir / "checkpoint.pt") if config.resume else None
        if file is not None:  # this run was stopped before
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            check_same_run(checkpoint["settings"], settings(config, config.batch_size), file)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            progress = checkpoint["progress"]
            log.print(f"resumed from {file}: epoch {progress['epoch']}, after step {progress['step']}")
            if progress["epoch"] > config.epochs:
                log.print(f"nothing is left to do: --epochs is {config.epochs}")
        for epoch in range(progress["epoch"], config.epochs + 1):
            # A new order of the samples; in a run that was stopped within the epoch, without those it has trained on.
            train_loader.batch_sampler.set_epoch(epoch, start_step=progress["step"])
            samples = max(0, len(train_loader.dataset) - progress["step"] * config.batch_size)
            started = time.perf_counter()
            train_loss = train_one_epoch(config, replicas, train_loader, optimizer, scheduler, device, log, progress)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            end_if_diverged(val_loss, progress)
            lr = scheduler.get_last_lr()[0]
            log.log_epoch(epoch, seconds, samples, lr, train_loss, val_loss, val_accuracy)
            scheduler.step()
            progress.update(epoch=epoch + 1, step=0, loss_sum=0.0)
            save_checkpoint(log.run_dir / "checkpoint.pt", state_of(config, replicas, optimizer, scheduler, progress))


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
