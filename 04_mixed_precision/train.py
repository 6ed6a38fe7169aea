"""Lesson 04: lesson 03 with fewer bits, fewer kernels and fewer launches: precision, fusion, compilation, CUDA graphs.

    python train.py --precision bf16 --channels_last true      # one rank, anywhere
    torchrun --standalone --nproc-per-node 2 train.py --config ../configs/unet3d_tiny.yaml    # the 3D U-Net on two
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_bs64_opt.yaml    # on a GPU, all of it

You should see what lesson 03 shows, with more samples per second and less memory, and losses that hardly differ.
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

from workshop.config import run_with_config
from workshop.ddp import AllReduces, ddp_options, share_batch
from workshop.distributed import Ranks, process_group
from workshop.graphs import StepGraph
from workshop.hardware import keep_freed_memory
from workshop.loaders import Loader, build_loaders
from workshop.models import build_model
from workshop.optimizers import build_optimizer
from workshop.precision import HALF, ComputeConfig, choose_memory_format, set_up_device
from workshop.profiling import annotate, profile
from workshop.runs import Run


@dataclass(frozen=True, kw_only=True)
class Config(ComputeConfig):
    """The flags of this lesson, on top of those all lessons share."""

    keep_memory: bool = False
    """on a CPU under Linux: keep freed memory for the next step instead of giving it back to the system"""


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
def train_one_epoch(
    config: Config,
    model: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    graph: StepGraph,
    device: torch.device,
    run: Run,
) -> float:
    """Show every training sample to the model once; return the mean loss."""
    model.train()
    loss_sum = run.loss_sum()  # zero, unless the run was stopped in the middle of this epoch and goes on there

    @profile
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a batch; nothing here waits for the device, so that a CUDA graph can hold the whole of it."""
        optimizer.zero_grad()
        with annotate("forward"), torch.autocast(device.type, HALF.get(config.precision), config.precision in HALF):
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
        with annotate("backward"):
            scaler.scale(loss).backward()
        with annotate("optimizer"):
            scaler.step(optimizer)
            scaler.update()
        return loss

    for inputs, targets in run.watch(loader):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        loss = graph(step, inputs, targets)
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # stays on the device
        run.end_step(loss)  # logs it now and then, which waits for the device
    dist.all_reduce(loss_sum)  # the sum over all ranks
    return loss_sum.item() / loader.sampler.samples


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float | None]:
    """Return the mean loss and, unless these are volumes, the share of right answers over the validation samples."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        with torch.autocast(device.type, HALF.get(config.precision), config.precision in HALF):
            outputs = model(inputs)
            loss_sum += loss_function(outputs, targets) * len(targets)
        if config.dataset != "nbody":
            correct += (outputs.argmax(dim=1) == targets).sum()
    for each_rank_sum in (loss_sum, correct):  # at the end only: some ranks may have had a batch more than others
        dist.all_reduce(each_rank_sum)
    accuracy = None if config.dataset == "nbody" else correct.item() / loader.sampler.samples
    return loss_sum.item() / loader.sampler.samples, accuracy


def main(config: Config) -> None:
    """Meet the other ranks, train with them, part."""
    with process_group() as ranks:
        train(share_batch(config, ranks), ranks)


def train(config: Config, ranks: Ranks) -> None:
    """Train for ``config.epochs`` epochs, validating and saving a checkpoint after each."""
    device = ranks.device
    set_up_device(config, device)  # or say what it lacks
    torch.manual_seed(config.seed + ranks.rank)  # ranks drop out different units; their weights will be those of rank 0
    if config.keep_memory:
        keep_freed_memory()
    train_loader, val_loader = build_loaders(config, ranks)
    memory_format = choose_memory_format(config)
    model = build_model(config).to(device, memory_format=memory_format)
    graph = StepGraph(config.cuda_graph, train_loader.sampler)
    with graph.beside():
        ddp_model = DistributedDataParallel(model, **ddp_options(config))  # has backward() average over the ranks
    all_reduces = AllReduces(ddp_model)
    communication = nullcontext() if config.sync_gradients else ddp_model.no_sync()
    outer = ddp_model if config.compile == "off" else torch.compile(ddp_model, mode=config.compile, dynamic=False)
    optimizer = build_optimizer(config, model, capturable=config.cuda_graph)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    steps, batch = config.epochs * len(train_loader), train_loader.sampler.global_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, batch, step, steps))

    with Run(config, ranks) as run, communication:
        if config.benchmark:
            run.benchmark(
                train_loader,
                lambda loader: train_one_epoch(config, outer, loader, optimizer, scheduler, scaler, graph, device, run),
            )
            return
        first_epoch = run.resume(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        for epoch in range(first_epoch, config.epochs + 1):
            train_loader.sampler.set_epoch(epoch)  # a new order of the samples
            started = time.perf_counter()
            train_loss = train_one_epoch(config, outer, train_loader, optimizer, scheduler, scaler, graph, device, run)
            seconds = time.perf_counter() - started
            run.note(str(all_reduces), **all_reduces.per_step())
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            run.save()


if __name__ == "__main__":
    run_with_config(main, Config)
