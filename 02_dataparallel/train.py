"""Lesson 02: lesson 01 on all GPUs of one machine, with one process and nn.DataParallel.

    python train.py              # trains
    kernprof -lv train.py        # trains, then shows the time spent on each line of train_one_epoch

You should see the losses of lesson 01, and a line that says how many GPUs are used. With one GPU or none, it says that
DataParallel does nothing there.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workshop.commandline import run_with_config
from workshop.config import TrainConfig
from workshop.hardware import pick_device
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader, init_worker
from workshop.models import build_model
from workshop.profiling import profile
from workshop.run import Run


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, in addition to those that all lessons share."""

    lr_decay: float = 0.7
    """factor on the learning rate after each epoch"""


def make_loader(config: Config, split: str, device: torch.device) -> Loader:
    """Return what gives the batches (inputs, targets) of a split, "train" or "val"."""
    if config.loader != "map":
        return build_loader(config, split, device)  # shards, memory, device or dali; the README compares them
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    dataset = ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)
    return DataLoader(
        dataset,
        # Like DataLoader's own shuffle=True, but the order follows from seed and epoch, so that a run can be resumed.
        batch_sampler=DistributedBatchSampler(len(dataset), config.batch_size, shuffle=training, seed=config.seed),
        # Processes that prepare batches while the model trains; with 0, the training process does both in turn.
        num_workers=config.num_workers,
        # Put batches into page-locked memory: only from there can a GPU copy while the CPU goes on.
        pin_memory=config.pin_memory and device.type == "cuda",
        # Keep the workers from one epoch to the next: starting them takes seconds.
        persistent_workers=config.persistent_workers and config.num_workers > 0,
        # Batches that each worker prepares ahead: they bridge the time of a slow one.
        prefetch_factor=config.prefetch_factor if config.num_workers > 0 else None,
        # Ctrl-C and Slurm send their signals to all processes: workers ignore them until the checkpoint is written.
        worker_init_fn=init_worker,
        # A generator for the seeds of the workers: from the default one, they would change the numbers of dropout.
        generator=torch.Generator(),
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


def state_of(replicas: nn.DataParallel, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return what a checkpoint holds; `Run.save` adds the epoch, the step and the states of the random generators."""
    model = replicas.module  # the model itself: DataParallel puts "module." before the name of every weight
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@profile
def train_one_epoch(
    config: Config,
    model: nn.DataParallel,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
) -> float:
    """Train on every training sample once; return the mean loss."""
    model.train()
    loss_sum = torch.tensor(run.partial_loss_sum, device=device)  # 0, unless this run was stopped within this epoch
    for inputs, targets in run.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        optimizer.zero_grad()
        with record_function("forward"):  # the name of this part of the step in profilers
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        run.end_step(loss)  # every --log_interval steps it prints the loss: only there the CPU waits for the device
        if run.should_save():  # every --save_interval steps, or because a signal asks this run to stop
            run.save(state_of(model, optimizer, scheduler), loss_sum)  # and end the run if it is to stop
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

    with Run(config, device) as run:
        if config.benchmark:
            benchmark(config, replicas, train_loader, optimizer, scheduler, device, run)
            return
        checkpoint = run.load_checkpoint(matching=state_of(replicas, optimizer, scheduler))
        if checkpoint is not None:  # --resume true, and this run was stopped before
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
        for epoch in range(run.next_epoch, config.epochs + 1):
            train_loader.batch_sampler.set_epoch(epoch)  # a new order of the samples
            started = time.perf_counter()
            train_loss = train_one_epoch(config, replicas, train_loader, optimizer, scheduler, device, run)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            scheduler.step()
            run.save(state_of(replicas, optimizer, scheduler))


def benchmark(
    config: Config,
    model: nn.DataParallel,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
) -> None:
    """Measure the throughput of loading alone (IO), of training alone (SYNTHETIC), and of both together (FULL)."""

    def train_on(batches: Loader) -> None:
        train_one_epoch(config, model, batches, optimizer, scheduler, device, run)

    run.benchmark(loader, train_on)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
