"""Lesson 04: lesson 03 with fewer bits, fewer kernels and fewer launches: precision, fusion, compilation, CUDA graphs.

    python train.py --precision bf16 --channels_last true      # one rank, anywhere
    python train.py --config ../configs/mnist.yaml --config ../configs/mnist_fast.yaml       # MNIST, everything on
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml     # a small 3D U-Net
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_opt.yaml      # on a GPU: the full one

You should see what lesson 03 shows, with losses that hardly differ, and with more samples per second where the hardware
computes in 16 bits. Start several ranks with torchrun, as in lesson 03.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workshop.commandline import run_with_config
from workshop.config import ComputeFlags, DDPFlags, TrainConfig, VolumeFlags
from workshop.distributed.all_reduce_counter import AllReduces, forward_sync_buffers, share_batch
from workshop.distributed.process_group import process_group
from workshop.distributed.ranks import Ranks
from workshop.loaders import Loader, build_loaders
from workshop.models import build_model
from workshop.profiling import annotate, profile
from workshop.run import Run
from workshop.step.graph import Step, StepGraph
from workshop.step.optimizers import build_optimizer
from workshop.step.precision import AUTOCAST_DTYPES, choose_memory_format, set_up_device


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig, DDPFlags, ComputeFlags, VolumeFlags):
    """The flags of this lesson: those of lesson 03, of how a step is computed, and of the U-Net and its volumes."""

    dataset: Literal["mnist", "cifar10", "nbody"] = "mnist"
    """data set to train on"""


def lr_factor(config: Config, global_batch_size: int, step: int, steps: int) -> float:
    """Return what to multiply --lr by in ``step`` of ``steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * steps)
    if step < warmup:
        return scale * (step + 1) / warmup
    return scale * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the samples: of the absolute error for volumes, of the cross-entropy for classes."""
    return F.l1_loss(outputs, targets) if targets.is_floating_point() else F.cross_entropy(outputs, targets)


@profile
def train_step(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Train on one batch and return its loss; nothing here waits for the device, so a CUDA graph can record it all."""
    dtype = AUTOCAST_DTYPES.get(config.precision)  # None for fp32 and tf32: then autocast is off
    optimizer.zero_grad()
    with annotate("forward"), torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
    with annotate("backward"):
        scaler.scale(loss).backward()
    with annotate("optimizer"):
        scaler.step(optimizer)
        scaler.update()
    return loss


@profile
def train_one_epoch(
    config: Config,
    model: nn.Module,
    loader: Loader,
    step: Step,
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
        loss = step(inputs, targets)  # train_step, or the CUDA graph of it
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # added up on the device, which the CPU does not have to wait for
        run.end_step(loss)  # every --log_interval steps it prints the loss: there the CPU waits for the device
    dist.all_reduce(loss_sum)  # the sum over all ranks
    return loss_sum.item() / loader.sampler.samples


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float | None]:
    """Return the mean loss and the share of right answers over the validation samples."""
    model.eval()
    dtype = AUTOCAST_DTYPES.get(config.precision)
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = model(inputs)
            loss_sum += loss_function(outputs, targets) * len(targets)
        if config.dataset != "nbody":
            correct += (outputs.argmax(dim=1) == targets).sum()
    for each_rank_sum in (loss_sum, correct):  # at the end only: some ranks may have had a batch more than others
        dist.all_reduce(each_rank_sum)
    accuracy = None if config.dataset == "nbody" else correct.item() / loader.sampler.samples  # volumes have none
    return loss_sum.item() / loader.sampler.samples, accuracy


def main(config: Config) -> None:
    """Train together with the other ranks."""
    with process_group() as (ranks, device):  # inside, all ranks have called torch.distributed.init_process_group
        train(share_batch(config, ranks), device, ranks)


def train(config: Config, device: torch.device, ranks: Ranks) -> None:
    """Train for ``config.epochs`` epochs, validating and saving a checkpoint after each."""
    set_up_device(config, device)  # sets TF32 and cuDNN; ends the run with one line if the device lacks an option
    torch.manual_seed(config.seed + ranks.rank)  # another seed for each rank, so that dropout differs between them
    train_loader, val_loader = build_loaders(config, device, ranks)
    memory_format = choose_memory_format(config.channels_last, volumes=config.dataset == "nbody")
    model = build_model(config).to(device, memory_format=memory_format)
    graph = StepGraph(config.cuda_graph, train_loader.sampler)
    with graph.on_its_stream():  # without a CUDA graph this changes nothing
        ddp_model = DistributedDataParallel(  # copies the weights of rank 0 to all; its backward() averages gradients
            model,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            **forward_sync_buffers(config.forward_sync_buffers),
        )
    all_reduces = AllReduces(ddp_model, enabled=not config.benchmark)
    communication = nullcontext() if config.sync_gradients else ddp_model.no_sync()
    if config.compile != "off":
        ddp_model = torch.compile(ddp_model, mode=config.compile, dynamic=False)
    optimizer = build_optimizer(config, model, fused=config.fused, capturable=config.cuda_graph)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    step = graph.around(partial(train_step, config, ddp_model, optimizer, scaler))
    steps, batch = config.epochs * len(train_loader), train_loader.sampler.global_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, batch, step, steps))

    with graph, Run(config, device, ranks) as run, communication:
        if config.benchmark:
            run.benchmark(
                train_loader,
                lambda loader: train_one_epoch(config, ddp_model, loader, step, scheduler, device, run),
            )
            return
        first_epoch = run.resume(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        for epoch in range(first_epoch, config.epochs + 1):
            train_loader.sampler.set_epoch(epoch)  # a new order of the samples
            started = time.perf_counter()
            train_loss = train_one_epoch(config, ddp_model, train_loader, step, scheduler, device, run)
            seconds = time.perf_counter() - started
            run.note(str(all_reduces), **all_reduces.per_step())
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            run.save()


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
