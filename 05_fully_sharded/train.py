"""Lesson 05: a language model whose weights, gradients and optimizer state are sharded over all ranks (FSDP2).

    python ../data/prepare.py text                              # the sources of Python's own library, 10 MB
    python train.py --limit_train 32000 --sample 400            # one rank, anywhere: minutes; then it writes a text
    torchrun --standalone --nproc-per-node 2 train.py           # two ranks on this machine; on Slurm: sbatch job.slurm
    python train.py --activation_checkpointing true --accumulate 4        # two ways to store less for backward
    torchrun --standalone --nproc-per-node 2 train.py --shard none        # DDP, for a model that fits on each GPU

The model predicts each byte of a text from those before it. You should see the bits that it needs for a byte fall from
8, and each rank stores only its part of the model. The losses are those of any number of ranks, and of DDP.
"""

import atexit
import gc
import json
import lzma
import math
import os
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from workshop.checks import check_compute_options, choose_precision
from workshop.config import (
    LessonFlags,
    RanksFlags,
    ScheduleFlags,
    check_same_run,
    may_change,
    require_positive,
    run_with_config,
)
from workshop.datasets.text import TextDataset
from workshop.errors import UserError, warn
from workshop.hardware import cpu_or_error
from workshop.loaders import DistributedBatchSampler, Loader
from workshop.log import Log
from workshop.models.gpt import GPT, gpt_size
from workshop.profiling import profile
from workshop.profiling.mfu import utilization
from workshop.profiling.monitor import monitoring
from workshop.profiling.throughput import benchmark
from workshop.profiling.trace import tracing
from workshop.ranks import Ranks
from workshop.run import RunFolder


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleFlags, RanksFlags, LessonFlags):
    """The flags of this lesson, in addition to those of its groups."""

    dataset: Literal["text"] = "text"
    """data set to train on"""
    model: Literal["gpt_tiny", "gpt2_124m", "gpt_1b", "gpt_7b"] = "gpt_tiny"
    """model to train; its size is in workshop/models/gpt.py"""
    width: int | None = None
    """embedding width (d_model), a multiple of the head dimension (default: the model's)"""
    depth: int | None = None
    """number of blocks (default: the model's)"""
    vocabulary: int | None = None
    """number of different tokens (default: the model's); a byte has 256 values"""
    sequence_length: int = 128
    """tokens in a sample; a token is a byte"""
    sample: int = 0
    """number of bytes to generate and print after training"""
    loader: Literal["map"] = "map"
    """kind of data loader"""
    batch_size: int = may_change(16)
    """samples per step and process"""
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    """optimizer; sgd has momentum 0.9"""
    lr: float = 3e-3
    """learning rate, above 0"""
    beta1: float = 0.9
    """decay rate of the mean of the gradients, with adam and adamw"""
    beta2: float = 0.999
    """decay rate of the mean of their squares"""
    weight_decay: float | None = None
    """weight decay of matrices (default: PyTorch's, for all weights: 0.01 with adamw, else 0)"""
    warmup: float = 0.05
    """length of the warm-up as a share of all steps, from 0 to below 1"""
    max_grad_norm: float | None = 1.0
    """largest norm of the gradients; larger ones are scaled down (null: never)"""
    shard: Literal["blocks", "keep", "root", "none"] = "blocks"
    """blocks: all-gather one block at a time; keep: the same, until backward; root: all at once; none: DDP"""
    replicas: int = may_change(1)
    """number of replica groups (HSDP); each holds the whole model, sharded over its ranks"""
    activation_checkpointing: bool = False
    """store only the input of each block for backward, and recompute its activations there"""
    accumulate: int = 1
    """number of parts of each batch whose gradients are accumulated"""
    reduce_each_part: bool = False
    """reduce and shard the gradients after each of these parts: less memory, more communication"""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """number format of computing and communication; auto: bf16 where the device has it, else fp32"""
    chunked_loss: bool = False
    """compute the output layer and the loss for some tokens at a time, so that the logits never exist whole"""
    compile: Literal["off", "default"] = "off"
    """let torch.compile fuse operations into fewer kernels"""
    fused: bool | None = None
    """let the optimizer update all weights in one kernel (default: with adam and adamw)"""
    async_save: bool = may_change(False)
    """copy checkpoints into CPU memory, and write them in a thread while training goes on"""
    mfu: bool = may_change(False)
    """measure the peak of this device first, and log the model FLOPs utilization"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "width", "depth", "sequence_length", "replicas", "accumulate", "max_grad_norm")
        if self.vocabulary is not None and self.vocabulary < 256:
            raise UserError(f"--vocabulary must be at least 256, the values of a byte, got {self.vocabulary}")
        if self.sample < 0:
            raise UserError(f"--sample must be 0 (none) or more, got {self.sample}")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise UserError(f"--weight_decay must be 0 or more, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.fused and self.optimizer == "sgd":
            raise UserError("--fused true: PyTorch's fused SGD takes no sharded weights; use --optimizer adam or adamw")
        if self.reduce_each_part and (self.accumulate == 1 or self.shard == "none"):
            raise UserError("--reduce_each_part true needs --accumulate 2 or more, and sharded weights")
        if self.chunked_loss and not hasattr(F, "linear_cross_entropy"):
            raise UserError(f"--chunked_loss true needs torch 2.13 or newer, this is {torch.__version__}")
        if self.shard == "none" and self.replicas > 1:
            raise UserError("--shard none: with DDP every rank is a replica; leave out --replicas")
        gpt_size(self.model, self.width, self.depth)  # raises UserError if heads do not divide the width


def check_parts(config: Config, ranks: Ranks, *, num_train: int, num_val: int) -> None:
    """Raise `UserError` unless every rank has a sample for each part of every batch, and one to validate on.

    Args:
        config: of the run; ``batch_size`` is the batch size of a rank, which is divided into ``accumulate`` parts.
        ranks: this process among all.
        num_train: size of the training data.
        num_val: size of the validation data.
    """
    world_size = ranks.world_size
    parts, rest = config.accumulate, num_train % (config.batch_size * world_size)
    if config.batch_size < parts:
        raise UserError(f"--accumulate {parts}: a batch of {config.batch_size} per rank has fewer samples than parts")
    if world_size <= rest < parts * world_size:  # fewer than a sample per rank are left out
        raise UserError(
            f"--accumulate {parts}: {num_train} samples leave a last batch of {rest}, less than a sample for each part "
            f"on each of {world_size} rank(s); use --limit_train {num_train - rest}"
        )
    if num_val < world_size:
        raise UserError(f"{num_val} validation sample(s) for {world_size} ranks: each rank needs at least one")


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

    There are no states of random generators in it: the order of the samples follows from seed and epoch, and the model
    draws no random numbers. With dropout, seed the generators in each step, as lesson 03 does.
    """

    model: FSDPModule | DistributedDataParallel
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler
    ranks: Ranks
    save_group: dist.ProcessGroup
    """process group for saving alone, because a thread may save while training goes on"""
    sum_of_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """the function of this name, perhaps compiled"""
    saving: list[Future] = field(default_factory=list)
    """the checkpoint that a thread is writing, if there is one"""
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of the training depends on. All ranks call this, and each returns its shards.

        The tensors share memory with the weights. Before the first step an optimizer has no state. Then this call makes
        one, by a step with gradients of zero and a learning rate of zero.
        """
        rest = {
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": progress_of_all_ranks(self.progress, self.ranks),
        }
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "rest": json.dumps(rest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned, perhaps of another number of ranks."""
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        rest = json.loads(state["rest"])
        self.scheduler.load_state_dict(rest["scheduler"])
        self.scaler.load_state_dict(rest["scaler"])
        self.progress = progress_of_this_rank(rest["progress"], self.ranks)


def ranks_from_env() -> tuple[int, int, int]:
    """Return rank, local rank and world size of this process, which the launcher has put into its environment.

    The rank is unique in the whole job, the local rank only on its node; the world size is the number of all ranks.
    """
    if "RANK" in os.environ:  # torchrun
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # srun
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1:  # the batch script itself is no task
        raise UserError(f"only one of {os.environ['SLURM_NTASKS']} tasks of this job was started: write srun before it")
    else:
        return 0, 0, 1  # python train.py: this process is the only one
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise UserError(f"{', '.join(names)} must be numbers: start the ranks with torchrun or srun") from error
    return rank, local_rank, world_size


def device_of_rank(local_rank: int) -> torch.device:
    """Return the GPU of this rank, which it shares with no other rank, or the CPU where there are no GPUs."""
    if not torch.cuda.is_available():
        return cpu_or_error()
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if ranks > gpus:
        raise UserError(
            f"torchrun started {ranks} ranks on this node, which has {gpus} GPU(s): start one rank per GPU, or try "
            f"several ranks on the CPUs: CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node {ranks} ..."
        )
    # On some clusters a task sees no other GPU than its own, which is then cuda:0 on every rank: hence the %.
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def join_ranks(timeout_minutes: float) -> Ranks:
    """Join the other ranks of this job; return which one this process is. The launcher has started all of them."""
    rank, local_rank, world_size = ranks_from_env()
    device = device_of_rank(local_rank)
    # Since PyTorch 2.15 "nccl" is a new backend, whose all-reduces may not overlap with backward, so keep the old one.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    # Wait until all ranks have joined at MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun) listens.
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",  # NVIDIA's library between GPUs, gloo between CPUs
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if world_size == 1 else None,  # a single rank joins nobody, and needs no address
        timeout=timedelta(minutes=timeout_minutes),  # if a rank is waited for longer than this, the job ends
        device_id=device if device.type == "cuda" else None,  # lets NCCL connect now, not in the first step
    )
    signal.signal(signal.SIGUSR1, request_stop)
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=device)


stop_requested = False
"""whether Slurm has sent the signal that job.slurm asks for, some time before the time limit"""


def request_stop(number: int, frame: FrameType | None) -> None:
    """Note that the job is to stop; `train_one_epoch` does so between two steps, when all ranks agree."""
    global stop_requested
    stop_requested = True


def ignore_stop_signal(worker_id: int) -> None:
    """Let a loader's worker ignore the signal, which Slurm sends to all processes of the job: it would end them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def any_rank(flags: list[bool], ranks: Ranks) -> list[bool]:
    """Return for each flag whether it is true on any rank: the same answer on all ranks, which all must call this."""
    on_device = torch.tensor(flags, dtype=torch.int32, device=ranks.device)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in on_device.tolist()]


CHECK_SECONDS = 2.5
"""longest time between two checks of the loss and the stop signal; each check makes the CPU wait for the device"""


class Checks:
    """Chooses the steps in which all ranks check whether to go on, about every CHECK_SECONDS.

    The clocks of the ranks differ, so they agree on a number of steps, which follows from the time of the slowest rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.interval = 1
        self.steps = 0
        self.started = time.monotonic()

    def due(self) -> bool:
        """Return whether to check after this step. Call this once in each step."""
        self.steps += 1
        return self.steps >= self.interval

    def agree(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is true on any rank. All ranks call this in the same step."""
        seconds = (time.monotonic() - self.started) / self.steps
        on_device = torch.tensor([*flags, seconds], dtype=torch.float32, device=self.ranks.device)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
        *answers, slowest = on_device.tolist()
        self.interval = max(1, min(2 * self.interval, int(CHECK_SECONDS / slowest)))  # the first steps are not typical
        self.steps, self.started = 0, time.monotonic()
        return [bool(answer) for answer in answers]


def progress_of_all_ranks(progress: Progress, ranks: Ranks) -> dict[str, Any]:
    """Return the progress for a checkpoint, with the sums of each rank. All ranks call this."""
    own = torch.tensor([progress.loss_sum, progress.count], dtype=torch.float64, device=ranks.device)
    of_ranks = [torch.zeros_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(of_ranks, own)
    loss_sums, counts = torch.stack(of_ranks).T.tolist()
    return asdict(progress) | {"loss_sum": loss_sums, "count": counts}


def progress_of_this_rank(saved: dict[str, Any], ranks: Ranks) -> Progress:
    """Return the progress from a checkpoint, perhaps of another number of ranks."""
    sums = list(zip(saved["loss_sum"], saved["count"], strict=True))
    if len(sums) != ranks.world_size:  # rank 0 takes all: only the sums over the ranks matter
        sums = [(math.fsum(saved["loss_sum"]), sum(saved["count"]))] + [(0.0, 0)] * (ranks.world_size - 1)
    loss_sum, count = sums[ranks.rank]
    return Progress(saved["epoch"], saved["step"], loss_sum, int(count))


def batch_size_per_rank(config: Config, world_size: int) -> int:
    """Return the number of samples per rank and step."""
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


def make_loader(config: Config, split: str, ranks: Ranks) -> Loader:
    """Return the loader of this rank's batches (inputs, targets) of a split, "train" or "val"; each (N, T) int64."""
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    dataset = TextDataset(config.data_dir, split, config.sequence_length, limit, seed=config.seed)
    # Validation takes as many samples at once as the largest part of a training batch, so it needs no more memory.
    batch_size = config.batch_size if training else math.ceil(config.batch_size / config.accumulate)
    # Every rank shuffles in the same way and takes every world_size-th sample of each global batch. In training, the
    # last global batch is left out if it has fewer samples than there are ranks. For its training data, a script of
    # your own can use DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, world_size, rank)), with the
    # sampler of torch.utils.data, and call its set_epoch(epoch). Not for validation: it repeats samples until all ranks
    # have equally many, and these would count twice.
    sampler = DistributedBatchSampler(
        len(dataset),
        batch_size,
        rank=ranks.rank,
        num_replicas=ranks.world_size,
        shuffle=training,
        seed=config.seed,
    )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        # Processes that prepare batches while the model trains; with 0, the training process loads each batch itself.
        num_workers=config.num_workers,
        # Put batches into page-locked memory: only from there can a GPU copy while the CPU goes on.
        pin_memory=config.pin_memory and ranks.device.type == "cuda",
        # Keep the workers from one epoch to the next: starting them takes seconds.
        persistent_workers=config.persistent_workers and config.num_workers > 0,
        # Batches that each worker prepares ahead: they bridge the time of a slow one.
        prefetch_factor=config.prefetch_factor if config.num_workers > 0 else None,
        # Slurm sends the signal before the time limit to the workers too, which would end them.
        worker_init_fn=ignore_stop_signal,
    )


def make_model(config: Config) -> nn.Module:
    """Return the model with fresh weights."""
    return GPT(gpt_size(config.model, config.width, config.depth, config.vocabulary))


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the optimizer that was chosen, over the weights of ``model``. If they are sharded, so is its state."""
    fused = config.optimizer != "sgd" if config.fused is None else config.fused
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if config.weight_decay is not None:  # of matrices; the vectors are weights of norms, which decay does not help
        matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = config.beta1, config.beta2
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9, fused=fused)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=fused)
    return torch.optim.Adam(groups, lr=config.lr, betas=betas, fused=fused)


def recomputed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward that stores only its inputs: backward calls it again when the activations are needed."""

    def forward_again(*inputs: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401  # torch.compile skips a partial
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return forward_again


def make_mesh(config: Config, ranks: Ranks) -> DeviceMesh:
    """Return which ranks share each weight: all of them, or with --replicas the ranks of a group.

    Ranks of one group have numbers in a row. So with as many groups as nodes, all that is sent for each block stays
    within a node, and only gradients, already sharded, are sent between nodes.
    """
    share, rest = divmod(ranks.world_size, config.replicas)
    if rest:
        raise UserError(f"--replicas {config.replicas} does not divide the {ranks.world_size} rank(s) of this job")
    if config.replicas == 1:
        return init_device_mesh(ranks.device.type, (ranks.world_size,))
    mesh = init_device_mesh(ranks.device.type, (config.replicas, share), mesh_dim_names=("replicate", "shard"))
    c10d = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # its name in torch 2.11
    for group in mesh.get_all_groups():  # otherwise a lost rank would be waited for in them for up to half an hour
        set_timeout(timedelta(minutes=config.timeout_minutes), group)
    return mesh


def distribute_model(config: Config, ranks: Ranks) -> FSDPModule | DistributedDataParallel:
    """Return the model, sharded over the ranks or, with --shard none, whole on each; rank 0 draws the weights."""
    if config.shard == "none":
        model = make_model(config).to(ranks.device)
        if config.activation_checkpointing:
            recompute_blocks(model)
        # Gradients lie in the buffers that are sent: no copy of each. The other options are in lesson 03.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return shard_model(config, ranks)


def compile_parts(model: FSDPModule | DistributedDataParallel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Let torch.compile fuse operations into fewer kernels, for this shape of batches; return a loss that is compiled.

    Under DDP it cuts the whole model where a bucket of gradients is complete, so that sending overlaps with backward.
    Of a sharded model the blocks are compiled: all have the same code, and what gathers weights stays outside.
    """
    for part in [model] if isinstance(model, DistributedDataParallel) else model.blocks:
        part.compile(dynamic=False)
    return torch.compile(sum_of_losses, dynamic=False)


def recompute_blocks(model: nn.Module) -> None:
    """Let backward compute the activations of each block again, instead of storing them."""
    for block in model.blocks:
        block.forward = recomputed(block.forward)


def shard_model(config: Config, ranks: Ranks) -> FSDPModule:
    """Return the model, of which each rank stores one shard of every weight; rank 0 draws the initial weights."""
    with torch.device("meta"):  # shapes without memory: no GPU has to hold the whole model, not even once
        model = make_model(config)
    if unfilled := sorted(dict(model.named_buffers()).keys() - model.state_dict().keys()):
        raise UserError(f"nothing would fill the buffers {unfilled} after to_empty: leave out persistent=False")
    if config.activation_checkpointing:
        recompute_blocks(model)
    mesh = make_mesh(config, ranks)
    # Compute in 16 bits, but store weights, gradients and optimizer state in 32: small updates would be lost in 16.
    # This takes the place of autocast: the weights are sent in this format too, which halves their bytes.
    policy = MixedPrecisionPolicy(param_dtype=sixteen_bits(config.precision), reduce_dtype=torch.float32)
    if config.shard != "root":
        for block in model.blocks:  # the weights of a block are all-gathered before it computes, and freed after it
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.shard == "blocks")
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)  # last: it takes the weights that are in no block
    sharded.to_empty(device=ranks.device)  # memory for this rank's shards, with random content
    initial = make_model(config).state_dict() if ranks.rank == 0 else {}  # in CPU memory of one rank
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, initial, options=options)  # gives each rank its shards
    return sharded


def sixteen_bits(precision: str) -> torch.dtype | None:
    """Return the type to compute in, if it has 16 bits; None for fp32 and tf32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast_for_ddp(config: Config, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass. Only DDP needs autocast: FSDP casts the weights that it gathers."""
    dtype = sixteen_bits(config.precision) if config.shard == "none" else None
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def gradient_sync(model: FSDPModule | DistributedDataParallel, enabled: bool) -> AbstractContextManager:
    """Return the context of a backward pass. Where it is not enabled, gradients stay on this rank and are added up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        return nullcontext()
    return nullcontext() if enabled else model.no_sync()


def lr_factor(config: Config, *, global_batch_size: int, step: int, total_steps: int) -> float:
    """Return the factor on --lr in ``step`` of ``total_steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * total_steps) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return scale * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))
    return scale * (config.min_lr + (1 - config.min_lr) * cosine)


IGNORED = -100
"""target of a position that does not count, such as padding"""


def sum_of_losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum () of the cross-entropy over the tokens of (N, T), from scores (N, T, vocabulary)."""
    in_fp32 = scores.float().flatten(0, 1)  # in 16 bits, a sum over thousands of classes loses its last digits
    return F.cross_entropy(in_fp32, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@profile
def train_step(
    config: Config, training: Training, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Train on one batch, part by part.

    Returns: The sum () of the losses of this rank's tokens, the number () of these tokens, and the norm () of the
    gradients over all ranks, if they are clipped.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    optimizer.zero_grad()
    loss_sum = torch.zeros((), device=inputs.device)
    # Parts and ranks can have unequal numbers of tokens, if sequences are padded or packed. So each loss is divided by
    # the tokens of the whole update, and not by its own.
    tokens = (targets != IGNORED).sum()
    all_tokens = tokens.clone()
    dist.all_reduce(all_tokens)
    parts = zip(inputs.tensor_split(config.accumulate), targets.tensor_split(config.accumulate), strict=True)
    for number, (part, part_targets) in enumerate(parts, start=1):
        # Gradients of the earlier parts stay on this rank, unsharded, and are sent once, after the last part; or, with
        # --reduce_each_part, each part's gradients are sent and added to the shard that this rank keeps.
        with gradient_sync(model, enabled=config.reduce_each_part or number == config.accumulate):
            with record_function("forward"), autocast_for_ddp(config, inputs.device):
                # Each block all-gathers its weights, computes, and frees the others' shards.
                if config.chunked_loss:
                    loss = model(part, part_targets)
                else:
                    loss = training.sum_of_losses(model(part), part_targets)
            with record_function("backward"):  # all-gathers again; each rank gets its shard of the mean gradients
                # The mean over the ranks of this is the mean over all tokens.
                scaler.scale(loss * training.ranks.world_size / all_tokens.clamp(min=1)).backward()
        loss_sum += loss.detach()
    norm = None
    with record_function("optimizer"):  # each rank updates the shards that it stores
        if config.max_grad_norm is not None:
            scaler.unscale_(optimizer)  # fp16: the norm is meant for the gradients without the scaler's factor
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)  # over the shards of all ranks
        scaler.step(optimizer)
        scaler.update()
    return loss_sum, tokens, norm


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first: `torch.distributed.checkpoint` writes ``.metadata`` last."""
    return sorted(file.parent for file in folder.glob("epoch*_step*/.metadata") if file.parent.suffix != ".damaged")


def crc32_of(file: Path) -> int:
    """Return a checksum of a file, which differs if a bit of it was flipped or its end is missing."""
    checksum = 0
    with file.open("rb") as content:
        while chunk := content.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def write_checksums(folder: Path, rank: int) -> None:
    """Write the checksums of the files that this rank has written; on rank 0, of the metadata too."""
    files = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    (folder / f"crc32_{rank}.json").write_text(json.dumps({file.name: crc32_of(file) for file in files}))


def is_damaged(folder: Path, rank: int, world_size: int) -> bool:
    """Read this rank's share of the files of a checkpoint; return whether one of them is not as it was written."""
    try:
        checksums = [json.loads(file.read_text()) for file in sorted(folder.glob("crc32_*.json"))]
        files = sorted(item for of_rank in checksums for item in of_rank.items())
        return any(crc32_of(folder / name) != checksum for name, checksum in files[rank::world_size])
    except (FileNotFoundError, ValueError):  # ValueError: a file of checksums is damaged itself
        return True


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


def finish_save(training: Training, log: Log) -> None:
    """Wait for the checkpoint that a thread may still be writing; delete all but the newest two."""
    while training.saving:
        training.saving.pop().result()  # raises what has gone wrong in the thread
    if training.ranks.rank == 0:
        for old in checkpoints_in(log.folder.path / "checkpoints")[:-2]:
            (old / ".metadata").unlink()  # first: without it, the rest is no checkpoint any more
            shutil.rmtree(old)


def save(training: Training, log: Log) -> None:
    """Save all that the rest of the training depends on. All ranks call this: each writes its shards."""
    progress, rank, config = training.progress, training.ranks.rank, log.config
    assert isinstance(config, Config)
    end_if_diverged(any_rank([not math.isfinite(progress.loss_sum)], training.ranks)[0], progress)
    finish_save(training, log)
    folder = log.folder.path / "checkpoints" / f"epoch{progress.epoch:04}_step{progress.step:07}"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it saved here
    dist.barrier()
    settings = json.dumps(log.folder.settings)  # the flags, to refuse a run with other flags
    state = training.state_dict() | {"settings": settings}
    # Without copying ahead on the GPU: the writing thread would do so on the first GPU, whichever GPU this rank has.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    if config.async_save:  # returns once this rank's shards are copied; the next step may change the weights
        future = dcp.async_save(state, storage_writer=writer, process_group=training.save_group)
        assert isinstance(future, Future)
        future.add_done_callback(lambda done: None if done.exception() else write_checksums(folder, rank))
        training.saving.append(future)
    else:
        dcp.save(state, storage_writer=writer, process_group=training.save_group)
        write_checksums(folder, rank)
        finish_save(training, log)


def find_sharded_checkpoint(folder: Path, ranks: Ranks) -> Path | None:
    """Return the newest checkpoint that is complete and undamaged; None if there is none. All ranks call this."""
    found = [checkpoints_in(folder)]
    dist.broadcast_object_list(found)  # all ranks take what rank 0 has found
    damaged: list[Path] = []
    for newest in reversed(found[0]):
        if any_rank([is_damaged(newest, ranks.rank, ranks.world_size)], ranks)[0]:
            damaged.append(newest)
            continue
        for bad in damaged if ranks.rank == 0 else []:
            warn(f"{bad} is damaged; continuing from {newest}")
            bad.rename(bad.with_suffix(".damaged"))  # otherwise it would count as one of the two that are kept
        return newest
    if damaged:
        raise UserError(f"all checkpoints in {folder} are damaged: delete them to start afresh")
    return None


def resume(training: Training, log: Log) -> None:
    """Continue from the newest checkpoint in the run's folder, if there is one. All ranks call this."""
    folder = find_sharded_checkpoint(log.folder.path / "checkpoints", training.ranks)
    if folder is None:
        log.print(f"no checkpoint in {log.folder.path}: training begins at step 0")
        return
    saved = {"settings": ""}
    dcp.load(saved, checkpoint_id=folder)  # first this entry alone: is it a checkpoint of the same run?
    check_same_run(json.loads(saved["settings"]), log.folder.settings, folder)
    state = training.state_dict()  # says which shards this rank needs; dcp.load fills them
    dcp.load(state, checkpoint_id=folder)
    training.load_state_dict(state)
    log.print(f"resumed from {folder}: epoch {training.progress.epoch}, after step {training.progress.step}")


@profile
def train_one_epoch(config: Config, training: Training, loader: Loader, log: Log) -> float | None:
    """Train for one epoch, each rank on its own samples; return the mean loss over the tokens of all ranks.

    If the run was stopped within this epoch, ``training.progress`` says after which step. If the job is to stop now,
    all is saved, and None returned.
    """
    progress, ranks, device = training.progress, training.ranks, training.ranks.device
    training.model.train()
    loss_sum = torch.tensor(progress.loss_sum, device=device)
    count = torch.tensor(progress.count, device=device)
    checks = Checks(ranks)
    log.start_epoch(loader)
    for inputs, targets in loader:
        log.start_step()  # the loop has waited for this batch until now
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        loss, tokens, norm = train_step(config, training, inputs, targets)
        training.scheduler.step()
        loss_sum += loss  # on the device: loss.item() would make the CPU wait in every step
        count += tokens
        progress.step += 1
        stop = False
        log_now = progress.step % config.log_interval == 0
        if (checks.due() or log_now) and not config.benchmark:
            value = (loss / tokens.clamp(min=1)).item()  # here, at a log line or every few seconds, the CPU waits
            diverged, stop = checks.agree(not math.isfinite(value), stop_requested)
            end_if_diverged(diverged, progress)
            if log_now:
                log.log_step(progress, value, **norm_for_log(norm))
        if stop or (config.save_interval and progress.step % config.save_interval == 0):
            progress.loss_sum, progress.count = loss_sum.item(), int(count.item())
            save(training, log)
        if stop:
            return None
        log.end_step()
    for sum_of_rank in (loss_sum, count):  # after this, the sums over all ranks
        dist.all_reduce(sum_of_rank)
    end_if_diverged(not math.isfinite(loss_sum.item()), progress)
    return loss_sum.item() / max(1, count.item())


def norm_for_log(norm: torch.Tensor | None) -> dict[str, float]:
    """Return the norm of the gradients, if it is known; all ranks call this, because each has a part of it."""
    if norm is None:
        return {}
    return {"grad_norm": (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()}


def same_steps(loader: Loader, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield batches (inputs, targets) and whether they count: some ranks have one batch less, and repeat their last.

    With lesson 03's DDP a rank could be done earlier. Here it must call the model as often as all others, because each
    call gathers weights from every rank.
    """
    steps = torch.tensor(len(loader), device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    taken = 0
    for inputs, targets in loader:
        yield inputs, targets, True
        taken += 1
    for _ in range(taken, int(steps)):
        yield inputs, targets, False


@torch.no_grad()  # not inference_mode: before the first step, it makes gathered weights that backward cannot use
def evaluate(config: Config, training: Training, loader: Loader) -> tuple[float, None]:
    """Return the mean loss over the validation tokens of all ranks; there is no share of correct answers."""
    model, device = training.model, training.ranks.device
    model.eval()
    loss_sum = torch.zeros((), device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, targets, counts in same_steps(loader, device):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        with autocast_for_ddp(config, device):
            scores = model(inputs)
        loss = training.sum_of_losses(scores, targets)
        if counts:
            loss_sum += loss
            count += (targets != IGNORED).sum()
    for sum_of_rank in (loss_sum, count):
        dist.all_reduce(sum_of_rank)
    return loss_sum.item() / max(1, count.item()), None


def log_text(config: Config, training: Training, dataset: TextDataset, val_loss: float, log: Log) -> None:
    """Print the bits per byte of the validation text, and a text that the model generates.

    A loss of x is x / ln 2 bits per byte. All ranks call this, because each call of the model gathers weights from all
    of them.
    """
    if training.ranks.rank == 0:
        validated = dataset.tokens[: len(dataset) * dataset.sequence_length].numpy().tobytes()
        xz = 8 * len(lzma.compress(validated, preset=9)) / len(validated)
        bits = val_loss / math.log(2)
        log.log_summary(
            f"validation: {bits:.3f} bits per byte; xz -9 needs {xz:.3f}, and a byte of unknown text 8",
            bits_per_byte=bits,
            xz_bits_per_byte=xz,
        )
    if config.sample:
        text = write_text(training.model, config, training.ranks.device)
        log.print(f"the model writes:\n{text}")


@torch.no_grad()
def write_text(model: nn.Module, config: Config, device: torch.device) -> str:
    """Return ``config.sample`` bytes that the model generates, sampled one by one; rank 0 samples for all ranks."""
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length of the text
    written = torch.tensor([[ord("\n")]], device=device)
    torch.manual_seed(config.seed)
    for _ in range(config.sample):
        with autocast_for_ddp(config, device):
            scores = model(written[:, -config.sequence_length :])[:, -1].float()
        byte = torch.multinomial(F.softmax(scores / 0.8, dim=-1), 1)  # below 1, it keeps more to what is likely
        dist.broadcast(byte, src=0)
        written = torch.cat([written, byte], dim=1)
    return bytes(written[0, 1:].tolist()).decode(errors="replace")


@record  # under torchrun, the log ends with the error of the rank that failed first
def main(config: Config) -> None:
    """Join the other ranks, train with them, and destroy the process group at the end."""
    ranks = join_ranks(config.timeout_minutes)
    # From here on, --batch_size is the number of samples per rank, also if --global_batch_size was given.
    config = replace(config, batch_size=batch_size_per_rank(config, ranks.world_size))
    config = replace(config, precision=choose_precision(config.precision, ranks.device))  # "auto": bf16 or fp32
    finished = train(config, ranks)
    dist.barrier()  # without a barrier, ranks that still send or save could take this one for failed
    dist.destroy_process_group()
    if not finished and ranks.rank == 0 and "SLURM_JOB_ID" in os.environ:  # back into the queue, to continue later
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)


def train(config: Config, ranks: Ranks) -> bool:
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each.

    Returns: Whether all epochs are done; False if the job is to stop before.
    """
    device = ranks.device
    check_compute_options(config, device)  # ends the run with one line if the device lacks an option
    # TF32: products of float32 matrices read only the first 10 bits of each number's fraction. Off unless asked for.
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.manual_seed(config.seed + ranks.rank)  # distribute_model takes the weights of rank 0
    train_loader = make_loader(config, "train", ranks)
    val_loader = make_loader(config, "val", ranks)
    check_parts(config, ranks, num_train=len(train_loader.dataset), num_val=len(val_loader.dataset))
    model = distribute_model(config, ranks)
    loss = sum_of_losses if config.compile == "off" else compile_parts(model)
    optimizer = make_optimizer(config, model)  # after sharding: an earlier one would update weights that are gone
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    total_steps = config.epochs * len(train_loader)
    global_batch_size = config.batch_size * ranks.world_size

    def factor(step: int) -> float:
        return lr_factor(config, global_batch_size=global_batch_size, step=step, total_steps=total_steps)

    scheduler = LambdaLR(optimizer, factor)
    save_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.timeout_minutes))
    training = Training(model, optimizer, scheduler, scaler, ranks, save_group, loss)

    with (
        RunFolder(config, ranks) as folder,
        Log(folder, tokens_per_sample=config.sequence_length) as log,
        tracing(log),
        monitoring(log),
    ):
        if config.mfu:  # the operations of the model, and the fastest product of matrices on this device
            size = gpt_size(config.model, config.width, config.depth, config.vocabulary)
            flops = config.sequence_length * size.flops_per_token(config.sequence_length)
            log.log_utilization(utilization(config, flops, device))
        if config.benchmark:  # loading alone (IO), training alone (SYNTHETIC), and both together (FULL)

            def train_on(batches: Loader) -> None:
                train_one_epoch(config, replace(training, progress=Progress()), batches, log)

            benchmark(log, train_loader, train_on)
            return True
        if config.resume:
            resume(training, log)
        # Python's garbage collector looks at all objects now and then, which takes a tenth of a second, on each rank in
        # another step, and all others wait. What exists now is needed until the end: it need not look at that again.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end of the process, libraries want their objects back
        if training.progress.epoch > config.epochs:
            log.print(f"nothing is left to do: --epochs is {config.epochs}")
        val_loss = math.nan
        for epoch in range(training.progress.epoch, config.epochs + 1):
            # A new order of the samples, the same on all ranks; in a run that was stopped within the epoch, without
            # those it has trained on.
            train_loader.batch_sampler.set_epoch(epoch, start_step=training.progress.step)
            samples = max(0, train_loader.batch_sampler.samples_per_epoch - training.progress.step * global_batch_size)
            started = time.perf_counter()
            train_loss = train_one_epoch(config, training, train_loader, log)
            if train_loss is None:
                finish_save(training, log)
                step = training.progress.step
                log.print(f"stopped and saved in epoch {epoch}; --resume true continues after step {step}")
                return False
            trained = time.perf_counter()
            val_loss, _ = evaluate(config, training, val_loader)
            end_if_diverged(not math.isfinite(val_loss), training.progress)
            log.log_epoch(  # rank 0 alone prints
                epoch,
                train_loss=train_loss,
                val_loss=val_loss,
                lr=training.scheduler.get_last_lr()[0],
                samples=samples,
                seconds=trained - started,
                val_seconds=time.perf_counter() - trained,
            )
            training.progress = Progress(epoch + 1)
            save(training, log)
            if epoch < config.epochs and any_rank([stop_requested], ranks)[0]:
                finish_save(training, log)
                log.print(f"stopped after epoch {epoch}; --resume true continues from there")
                return False
        finish_save(training, log)
        if math.isfinite(val_loss):  # not if nothing was left to do
            log_text(config, training, val_loader.dataset, val_loss, log)
        return True


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
