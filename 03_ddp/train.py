"""Lesson 03: lesson 01 with many processes, one per GPU on one node or many, and DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 train.py     # two ranks on this machine; under Slurm: sbatch job.slurm
    python train.py                          # one rank

You should see what lesson 01 shows, told once for all ranks: the same accuracy, more samples per second if each rank
has a device of its own, and how much the ranks have to say to each other in a step.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workshop.config import run_with_config
from workshop.ddp import AllReduces, DDPConfig, ddp_options, share_batch
from workshop.distributed import Ranks, process_group
from workshop.hardware import keep_freed_memory
from workshop.loaders import Loader, build_loaders
from workshop.models import build_model
from workshop.optimizers import build_optimizer
from workshop.profiling import annotate, profile
from workshop.runs import Run


@dataclass(frozen=True, kw_only=True)
class Config(DDPConfig):
    """The flags of this lesson, on top of those all lessons share."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: compute in half as many bits where that is safe, as torch.autocast knows"""
    keep_memory: bool = False
    """on a CPU under Linux: keep freed memory for the next step instead of giving it back to the system"""
    channels_last: bool = False
    """keep the channels of a pixel side by side in memory, as fast convolutions want them"""


def lr_factor(config: Config, global_batch_size: int, step: int, steps: int) -> float:
    """Return what to multiply --lr by in ``step`` of ``steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * steps)
    if step < warmup:
        return scale * (step + 1) / warmup
    return scale * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@profile
def train_one_epoch(
    config: Config,
    model: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
    run: Run,
) -> float:
    """Show every training sample to the model once; return the mean loss."""
    model.train()
    loss_sum = run.loss_sum()  # zero, unless the run was stopped in the middle of this epoch and goes on there
    for inputs, targets in run.watch(loader):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        optimizer.zero_grad()
        with annotate("forward"), torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
        with annotate("backward"):
            loss.backward()
        with annotate("optimizer"):
            optimizer.step()
            scheduler.step()
        loss_sum += loss.detach() * len(targets)  # stays on the device
        run.end_step(loss)  # logs it now and then, which waits for the device
    dist.all_reduce(loss_sum)  # the sum over all ranks
    return loss_sum.item() / loader.sampler.samples


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the share of right answers over the validation samples."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            outputs = model(inputs)
            loss_sum += F.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(dim=1) == targets).sum()
    for each_rank_sum in (loss_sum, correct):  # at the end only: some ranks may have had a batch more than others
        dist.all_reduce(each_rank_sum)
    return loss_sum.item() / loader.sampler.samples, correct.item() / loader.sampler.samples


def main(config: Config) -> None:
    """Meet the other ranks, train with them, part."""
    with process_group() as ranks:
        train(share_batch(config, ranks), ranks)


def train(config: Config, ranks: Ranks) -> None:
    """Train for ``config.epochs`` epochs, validating and saving a checkpoint after each."""
    device = ranks.device
    torch.manual_seed(config.seed + ranks.rank)  # ranks drop out different units; their weights will be those of rank 0
    if config.keep_memory:
        keep_freed_memory()
    train_loader, val_loader = build_loaders(config, ranks)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model = build_model(config).to(device, memory_format=memory_format)
    ddp_model = DistributedDataParallel(model, **ddp_options(config))  # has backward() average over the ranks
    all_reduces = AllReduces(ddp_model)
    communication = nullcontext() if config.sync_gradients else ddp_model.no_sync()
    optimizer = build_optimizer(config, model)
    steps, batch = config.epochs * len(train_loader), train_loader.sampler.global_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, batch, step, steps))

    with Run(config, ranks) as run, communication:
        if config.benchmark:
            run.benchmark(
                train_loader,
                lambda loader: train_one_epoch(config, ddp_model, loader, optimizer, scheduler, device, run),
                ddp_model.no_sync,  # measures the same without communication too
            )
            return
        first_epoch = run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in range(first_epoch, config.epochs + 1):
            train_loader.sampler.set_epoch(epoch)  # a new order of the samples
            started = time.perf_counter()
            train_loss = train_one_epoch(config, ddp_model, train_loader, optimizer, scheduler, device, run)
            seconds = time.perf_counter() - started
            run.note(str(all_reduces), **all_reduces.per_step())
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            run.save()


if __name__ == "__main__":
    run_with_config(main, Config)
