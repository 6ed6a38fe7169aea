"""Lesson 03: lesson 01 with many processes, one per GPU on one node or many, and DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 train.py     # two ranks on this machine; under Slurm: sbatch job.slurm
    python train.py                          # one rank

You should see what lesson 01 shows, printed once for all ranks: the same accuracy, more samples per second if each rank
has a device of its own, and how many bytes of gradients the ranks exchange in a step.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workshop.commandline import run_with_config
from workshop.config import DDPFlags, TrainConfig
from workshop.distributed.ddp import AllReduces, forward_sync_buffers, share_batch
from workshop.distributed.process_group import process_group
from workshop.distributed.ranks import Ranks
from workshop.loaders import Loader, build_loaders
from workshop.models import build_model
from workshop.profiling import annotate, profile
from workshop.run import Run
from workshop.step.optimizers import build_optimizer


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig, DDPFlags):
    """The flags of this lesson: those that all lessons share, and those of DistributedDataParallel."""


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
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
) -> float:
    """Show every training sample to the model once; return the mean loss."""
    model.train()
    loss_sum = run.loss_sum()  # zero, unless this run was stopped in the middle of this epoch and now goes on there
    for inputs, targets in run.watch(loader):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        optimizer.zero_grad()
        with annotate("forward"):  # a name for this part of the step, shown by profilers
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
        with annotate("backward"):
            loss.backward()
        with annotate("optimizer"):
            optimizer.step()
            scheduler.step()
        loss_sum += loss.detach() * len(targets)  # added up on the device, which the CPU does not have to wait for
        run.end_step(loss)  # every --log_interval steps it prints the loss: there the CPU waits for the device
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
        outputs = model(inputs)
        loss_sum += F.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(dim=1) == targets).sum()
    for each_rank_sum in (loss_sum, correct):  # at the end only: some ranks may have had a batch more than others
        dist.all_reduce(each_rank_sum)
    return loss_sum.item() / loader.sampler.samples, correct.item() / loader.sampler.samples


def main(config: Config) -> None:
    """Train together with the other ranks."""
    with process_group() as (ranks, device):  # inside, all ranks have called torch.distributed.init_process_group
        train(share_batch(config, ranks), device, ranks)


def train(config: Config, device: torch.device, ranks: Ranks) -> None:
    """Train for ``config.epochs`` epochs, validating and saving a checkpoint after each."""
    torch.manual_seed(config.seed + ranks.rank)  # another seed for each rank, so that dropout differs between them
    train_loader, val_loader = build_loaders(config, device, ranks)
    model = build_model(config).to(device)
    ddp_model = DistributedDataParallel(  # copies the weights of rank 0 to all; its backward() averages gradients
        model,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        **forward_sync_buffers(config.forward_sync_buffers),
    )
    all_reduces = AllReduces(ddp_model, enabled=not config.benchmark)
    communication = nullcontext() if config.sync_gradients else ddp_model.no_sync()
    optimizer = build_optimizer(config, model)
    steps, batch = config.epochs * len(train_loader), train_loader.sampler.global_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, batch, step, steps))

    with Run(config, device, ranks) as run, communication:
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
    run_with_config(main, Config, __doc__)
