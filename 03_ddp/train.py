"""Lesson 03: lesson 01 with many processes, one per GPU on one node or many, and DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 train.py     # two ranks on this machine; under Slurm: sbatch job.slurm
    python train.py                                       # one rank

You should see what lesson 01 shows, printed once for all ranks: the same accuracy, more samples per second if each rank
has a device of its own, and how many bytes of gradients the ranks exchange in a step.
"""

import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workshop.commandline import run_with_config
from workshop.config import TrainConfig, require_positive
from workshop.distributed import AllReduceCounter, failure_detector, int_from_env, rendezvous, started_by_srun
from workshop.errors import UserError
from workshop.hardware import cpu_or_error
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader, init_worker
from workshop.models import build_model
from workshop.profiling import profile
from workshop.run import Run


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, in addition to those that all lessons share."""

    global_batch_size: int | None = None
    """samples per step over all ranks; if given, each rank gets an equal part of it, and --batch_size is ignored"""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """how --lr, which is meant for steps of base_batch_size samples, grows with the global batch size"""
    base_batch_size: int = 64
    """the global batch size that --lr is meant for"""
    warmup: float = 0.1
    """share of all steps in which the learning rate rises from almost zero, from 0 to below 1"""
    bucket_cap_mb: float | None = None
    """largest size in MiB of a bucket, in which gradients are sent together (default: PyTorch's 25, the first one 1)"""
    gradient_as_bucket_view: bool = False
    """let the gradients be views into the buckets instead of copying them there: saves the memory of one copy"""
    static_graph: bool = False
    """promise that every step uses the same parameters in the same way, which lets DDP optimize more"""
    forward_sync_buffers: bool = True
    """before each forward pass, give all ranks the buffers (such as batch norm's statistics) of rank 0"""
    sync_gradients: bool = True
    """false: no communication, to measure what it costs; each rank then trains its own model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "global_batch_size", "base_batch_size", "bucket_cap_mb")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb > 1e6:
            raise UserError(f"--bucket_cap_mb is in MiB, at most a million, got {self.bucket_cap_mb}")
        if self.static_graph and not self.sync_gradients:
            raise UserError("--static_graph true learns the graph during communication: it needs --sync_gradients true")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")


def ranks_from_env() -> tuple[int, int, int]:
    """Return rank, local rank and world size of this process, which the launcher has put into its environment.

    The rank is unique in the whole job, the local rank only on its node; the world size is the number of all ranks.
    """
    if "RANK" in os.environ:  # torchrun
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif started_by_srun():  # one process per task (a batch script has SLURM_PROCID too, but no task of its own)
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:
        return 0, 0, 1  # python train.py: this process is the only one
    # int_from_env(name) is int(os.environ[name]), but ends with one line if that is missing or no number.
    rank, local_rank, world_size = (int_from_env(name) for name in names)
    return rank, local_rank, world_size


def batch_size_per_rank(config: Config, world_size: int) -> int:
    """Return how many samples each rank takes in a step."""
    if config.global_batch_size is None:
        return config.batch_size
    share, rest = divmod(config.global_batch_size, world_size)
    if rest:
        near = max(share, 1) * world_size
        raise UserError(
            f"--global_batch_size {config.global_batch_size} cannot be shared evenly by {world_size} ranks; "
            f"{near} or {near + world_size} could"
        )
    return share


def make_loader(config: Config, split: str, device: torch.device, rank: int, world_size: int) -> Loader:
    """Return what gives this rank its batches (inputs, targets) of a split, "train" or "val"."""
    if config.loader != "map":
        return build_loader(config, split, device, rank, world_size)  # shards, memory, device or dali, as in lesson 01
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    dataset = ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)
    # Every rank shuffles in the same way and takes every world_size-th sample of each global batch. In training, the
    # last global batch is left out if it has fewer samples than there are ranks. For its training data, a script of
    # your own can use DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, world_size, rank)), with the
    # sampler of torch.utils.data, and call its set_epoch(epoch). Not for validation: it repeats samples until all ranks
    # have equally many, and these would count twice.
    sampler = DistributedBatchSampler(
        len(dataset), config.batch_size, rank=rank, num_replicas=world_size, shuffle=training, seed=config.seed
    )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
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
        # A generator for the seeds of the workers: from the default one, they would change the numbers of dropout. (All
        # ranks get the same seeds here. That is no problem, because the data set seeds each sample by itself.)
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


def lr_factor(config: Config, global_batch_size: int, step: int, total_steps: int) -> float:
    """Return the factor on --lr in ``step`` of ``total_steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * total_steps)
    if step < warmup:
        return scale * (step + 1) / warmup
    return scale * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))


def state_of(ddp_model: DistributedDataParallel, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return what a checkpoint holds; `Run.save` adds the epoch, the step and the states of the random generators."""
    model = ddp_model.module  # the model itself: DDP puts "module." before the name of every weight
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@profile
def train_one_epoch(
    config: Config,
    ddp_model: DistributedDataParallel,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
) -> float:
    """Train for one epoch, each rank on its own samples; return the mean loss over the samples of all ranks."""
    ddp_model.train()
    loss_sum = torch.tensor(run.partial_loss_sum, device=device)  # 0, unless this run was stopped within this epoch
    for inputs, targets in run.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        optimizer.zero_grad()
        with record_function("forward"):  # the name of this part of the step in profilers
            outputs = ddp_model(inputs)
            loss = F.cross_entropy(outputs, targets)
        with record_function("backward"):
            # Averages the gradients over the ranks. As each loss is a mean over the samples of its rank, the result is
            # the gradient of the whole batch if all have equally many; in the last step of an epoch some have one less.
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            scheduler.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        run.end_step(loss)  # every --log_interval steps it prints the loss: only there the CPU waits for the device
        if run.should_save():  # every --save_interval steps, or because a signal asks this run to stop
            run.save(state_of(ddp_model, optimizer, scheduler), loss_sum)  # called by all ranks; may end the run
    dist.all_reduce(loss_sum)  # the sum over all ranks
    return loss_sum.item() / loader.batch_sampler.samples_per_epoch  # without those that are left out


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the share of correct answers over the validation samples.

    It is given the model itself, not the DDP model, whose forward pass can communicate: a rank with a batch more than
    the others would wait there for ranks that have left the loop.
    """
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        outputs = model(inputs)
        loss_sum += F.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(dim=1) == targets).sum()
    for sum_of_rank in (loss_sum, correct):  # after the loop: some ranks may have had one batch more than others
        dist.all_reduce(sum_of_rank)
    return loss_sum.item() / len(loader.dataset), correct.item() / len(loader.dataset)


def main(config: Config) -> None:
    """Join the other ranks, train with them, and destroy the process group at the end."""
    rank, local_rank, world_size = ranks_from_env()
    if torch.cuda.is_available():
        # Each rank has its own GPU. On some clusters a task sees no other GPU, and its own is cuda:0: hence the %.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = cpu_or_error()
    # Wait until all ranks have joined at MASTER_ADDR:MASTER_PORT, where rank 0 listens; exit with one line if not.
    # torchrun sets these two variables; for srun, job.slurm exports them. A single rank needs none.
    store = rendezvous(rank, world_size, device)
    with failure_detector(store, rank, world_size):  # if a rank dies or is suspended, it ends the others in a minute
        dist.init_process_group(  # without `store` it does the rendezvous itself, and needs the two variables always
            backend="nccl" if device.type == "cuda" else "gloo",  # NVIDIA's library between GPUs, gloo between CPUs
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,  # lets NCCL connect now, not in the first step
        )
        # From here on, --batch_size is the number of samples per rank, also if --global_batch_size was given.
        train(replace(config, batch_size=batch_size_per_rank(config, world_size)), rank, world_size, device)
        dist.destroy_process_group()


def train(config: Config, rank: int, world_size: int, device: torch.device) -> None:
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each."""
    torch.manual_seed(config.seed + rank)  # a different seed on each rank: otherwise dropout would be the same on all
    train_loader = make_loader(config, "train", device, rank, world_size)
    val_loader = make_loader(config, "val", device, rank, world_size)
    model = build_model(config.model, config.dataset, dropout=config.dropout).to(device)
    ddp_model = DistributedDataParallel(  # gives all ranks the weights of rank 0; averages gradients in backward()
        model,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
    )
    # An attribute, because torch 2.13 renamed the argument broadcast_buffers to forward_sync_buffers: this line works
    # with older and with newer versions.
    ddp_model.broadcast_buffers = config.forward_sync_buffers
    counter = AllReduceCounter(ddp_model, enabled=not config.benchmark)
    maybe_no_sync = nullcontext() if config.sync_gradients else ddp_model.no_sync()
    optimizer = make_optimizer(config, model)
    total_steps = config.epochs * len(train_loader)
    global_batch_size = config.batch_size * world_size
    scheduler = LambdaLR(optimizer, lambda number: lr_factor(config, global_batch_size, number, total_steps))

    with Run(config, device, rank, world_size) as run, maybe_no_sync:
        if config.benchmark:
            benchmark(config, ddp_model, train_loader, optimizer, scheduler, device, run)
            return
        checkpoint = run.load_checkpoint(matching=state_of(ddp_model, optimizer, scheduler))
        if checkpoint is not None:  # --resume true, and this run was stopped before
            model.load_state_dict(checkpoint["model"])  # on every rank: DDP has already copied the weights of rank 0
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
        for epoch in range(run.next_epoch, config.epochs + 1):
            train_loader.batch_sampler.set_epoch(epoch)  # a new order of the samples, the same on all ranks
            started = time.perf_counter()
            train_loss = train_one_epoch(config, ddp_model, train_loader, optimizer, scheduler, device, run)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            if rank == 0:  # all ranks have the same results, so one of them prints
                run.log_summary(str(counter), **counter.per_step())
                run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            run.save(state_of(ddp_model, optimizer, scheduler))  # every rank adds its random state; rank 0 writes


def benchmark(
    config: Config,
    ddp_model: DistributedDataParallel,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
) -> None:
    """Measure the throughput of loading alone, of training alone, of both together, and without communication."""

    def train_on(batches: Loader) -> None:
        train_one_epoch(config, ddp_model, batches, optimizer, scheduler, device, run)

    run.benchmark(loader, train_on, ddp_model.no_sync)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
