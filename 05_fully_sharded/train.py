"""Lesson 05: a language model whose weights, gradients and optimizer state are sharded over all ranks (FSDP2).

    python ../data/prepare.py text                              # the sources of Python's own library, 10 MB
    python train.py --limit_train 32000 --sample 400            # one rank, anywhere: minutes; then it writes a text
    torchrun --standalone --nproc-per-node 2 train.py           # two ranks on this machine; on Slurm: sbatch job.slurm
    python train.py --activation_checkpointing true --accumulate 4        # two ways to store less for backward

The model predicts each byte of a text from those before it. You should see the bits that it needs for a byte fall from
8, and each rank stores only its part of the model. The losses are those of any number of ranks, and of DDP.
"""

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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from workshop.checks import check_compute_options, check_parts, choose_precision
from workshop.config import TrainConfig, check_same_run, require_positive, run_with_config, settings
from workshop.datasets.text import TextDataset
from workshop.errors import UserError, warn
from workshop.hardware import cpu_or_error
from workshop.loaders import DistributedBatchSampler, Loader
from workshop.log import RunLogger
from workshop.models.gpt import GPT, gpt_size
from workshop.profiling import profile
from workshop.profiling.mfu import utilization
from workshop.profiling.throughput import benchmark


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, in addition to those that all lessons share."""

    dataset: Literal["text"] = "text"  # type: ignore[assignment]  # this lesson has a data set of its own
    """data set to train on"""
    model: Literal["gpt_tiny", "gpt2_124m", "gpt_1b", "gpt_7b"] = "gpt_tiny"
    """model to train; its size is in workshop/models/gpt.py"""
    width: int | None = None
    """numbers that describe a token, a multiple of the model's head dimension (default: the model's)"""
    depth: int | None = None
    """number of blocks (default: the model's)"""
    sequence_length: int = 128
    """bytes in a sample, each of which is predicted from those before it"""
    sample: int = 0
    """after training, print so many bytes that the model writes"""
    loader: Literal["map"] = "map"
    """how samples reach the training loop"""
    batch_size: int = 16
    """samples per step and process"""
    global_batch_size: int | None = None
    """samples per step over all ranks; if given, each rank gets an equal part of it, and --batch_size is ignored"""
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    """how the weights are updated, with PyTorch's defaults; sgd has momentum 0.9"""
    lr: float = 3e-3
    """learning rate, above 0"""
    warmup: float = 0.05
    """share of all steps in which the learning rate rises from almost zero, from 0 to below 1"""
    max_grad_norm: float | None = 1.0
    """scale the gradients down where their norm over all ranks is larger than this (null: never)"""
    shard: Literal["blocks", "keep", "root"] = "blocks"
    """blocks: gather the weights of one block at a time; keep: the same, until backward; root: all weights at once"""
    replicas: int = 1
    """divide the ranks into so many groups; each group has the whole model, sharded over its ranks (HSDP)"""
    activation_checkpointing: bool = False
    """store only the input of each block for backward, and compute the rest of the block again there"""
    accumulate: int = 1
    """number of parts of each batch that are computed one after the other; their gradients are added up"""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: round what matrix products read; bf16, fp16: send weights and compute in half as many bits;
    auto: bf16 where the device computes in it, else fp32"""
    compile: Literal["off", "default"] = "off"
    """let torch.compile fuse operations into fewer kernels"""
    fused: bool = False
    """let the optimizer update all weights in one kernel"""
    async_save: bool = False
    """copy this rank's parts of a checkpoint into CPU memory, and let a thread write them while training goes on"""
    timeout_minutes: float = 10.0
    """how long a rank waits for the others before the job ends: longer than saving, validating or compiling may take"""
    mfu: bool = False
    """measure the peak of this device first, and log what share of it the operations of the model are"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "width", "depth", "sequence_length", "global_batch_size", "replicas", "accumulate")
        require_positive(self, "max_grad_norm", "timeout_minutes")
        if self.sample < 0:
            raise UserError(f"--sample must be 0 (none) or more, got {self.sample}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")
        if self.fused and self.optimizer == "sgd":
            raise UserError("--fused true: PyTorch's fused SGD takes no sharded weights; use --optimizer adam or adamw")
        gpt_size(self.model, self.width, self.depth)  # raises UserError if heads do not divide the width


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


stop_requested = False
"""whether Slurm has sent the signal that job.slurm asks for, some time before the time limit"""


def request_stop(number: int, frame: FrameType | None) -> None:
    """Note that the job is to stop; `train_one_epoch` does so between two steps, when all ranks agree."""
    global stop_requested
    stop_requested = True


def ignore_stop_signal(worker_id: int) -> None:
    """Let a loader's worker ignore the signal, which Slurm sends to all processes of the job: it would end them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """Return for each flag whether it is true on any rank: the same answer on all ranks, which all must call this."""
    on_device = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in on_device.tolist()]


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


def make_loader(config: Config, split: str, rank: int, world_size: int) -> Loader:
    """Return what gives this rank its batches (inputs, targets) of a split, "train" or "val"; each (N, T) int64."""
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    dataset = TextDataset(config.data_dir, split, config.sequence_length, limit, seed=config.seed)
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
        # Processes that prepare batches while the model trains; with 0, the training process loads each batch itself.
        num_workers=config.num_workers,
        # Put batches into page-locked memory: only from there can a GPU copy while the CPU goes on.
        pin_memory=config.pin_memory and torch.cuda.is_available(),
        # Keep the workers from one epoch to the next: starting them takes seconds.
        persistent_workers=config.persistent_workers and config.num_workers > 0,
        # Batches that each worker prepares ahead: they bridge the time of a slow one.
        prefetch_factor=config.prefetch_factor if config.num_workers > 0 else None,
        # Slurm sends the signal before the time limit to the workers too, which would end them.
        worker_init_fn=ignore_stop_signal,
    )


def make_model(config: Config) -> GPT:
    """Return the model with fresh weights."""
    return GPT(gpt_size(config.model, config.width, config.depth))


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the optimizer that was chosen, over the weights of ``model``, which are sharded: so is then its state."""
    fused = config.fused or None  # one kernel for all weights; None: PyTorch chooses
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, fused=fused)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.lr, fused=fused)
    return torch.optim.Adam(model.parameters(), lr=config.lr, fused=fused)


def recomputed(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that stores only its input: backward calls it again when the activations are needed."""

    def forward_again(inputs: torch.Tensor) -> torch.Tensor:  # a function, because torch.compile skips a partial
        return checkpoint(forward, inputs, use_reentrant=False)

    return forward_again


def make_mesh(config: Config, device: torch.device, world_size: int) -> DeviceMesh:
    """Return which ranks share each weight: all of them, or with --replicas those of a group.

    Ranks of one group have numbers in a row. So with as many groups as nodes, all that is sent for each block stays
    within a node, and only gradients, already sharded, are sent between nodes.
    """
    share, rest = divmod(world_size, config.replicas)
    if rest:
        raise UserError(f"--replicas {config.replicas} does not divide the {world_size} rank(s) of this job")
    if config.replicas == 1:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(device.type, (config.replicas, share), mesh_dim_names=("replicate", "shard"))


def shard_model(config: Config, rank: int, device: torch.device, world_size: int) -> FSDPModule:
    """Return the model, of which each rank stores one part of every weight; rank 0 draws the initial weights."""
    with torch.device("meta"):  # shapes without memory: no GPU has to hold the whole model, not even once
        model = make_model(config)
    if config.activation_checkpointing:
        for block in model.blocks:  # the block's activations are computed again when backward needs them
            block.forward = recomputed(block.forward)
    mesh = make_mesh(config, device, world_size)
    # Compute in 16 bits, but store weights, gradients and optimizer state in 32: small updates would be lost in 16.
    # This takes the place of autocast: the weights are sent in this format too, which halves their bytes.
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if config.shard != "root":
        for block in model.blocks:  # the weights of a block are gathered before it computes, and freed after it
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.shard == "blocks")
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)  # last: it takes the weights that are in no block
    sharded.to_empty(device=device)  # memory for this rank's parts, with random content
    initial = make_model(config).state_dict() if rank == 0 else {}  # in CPU memory of one rank
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, initial, options=options)  # gives each rank its part
    return sharded


def lr_factor(config: Config, step: int, total_steps: int) -> float:
    """Return the factor on --lr in ``step`` of ``total_steps``, counted from 0: it rises, then falls as a cosine."""
    warmup = int(config.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))


def loss_function(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy () over all bytes of (N, T), from scores (N, T, vocabulary) in float32."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@profile
def train_step(
    config: Config,
    model: FSDPModule,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Train on one batch, part by part, and return its mean loss ()."""
    optimizer.zero_grad()
    loss_sum = torch.zeros((), device=inputs.device)
    parts = zip(inputs.tensor_split(config.accumulate), targets.tensor_split(config.accumulate), strict=True)
    for number, (part, part_targets) in enumerate(parts, start=1):
        # Gradients of the earlier parts stay on this rank, unsharded; they are sent once, after the last part.
        model.set_requires_gradient_sync(number == config.accumulate)
        with record_function("forward"):  # each block gathers its weights, computes, and frees the parts of others
            scores = model(part)
            loss = loss_function(scores.float(), part_targets) * (len(part) / len(inputs))  # parts may differ in size
        with record_function("backward"):  # gathers the weights again; each rank gets its part of the mean gradients
            scaler.scale(loss).backward()
        loss_sum += loss.detach()
    with record_function("optimizer"):  # each rank updates the parts that it stores
        if config.max_grad_norm is not None:
            scaler.unscale_(optimizer)  # fp16: the norm is meant for the gradients without the scaler's factor
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)  # the norm over all ranks' parts
        scaler.step(optimizer)
        scaler.update()
    return loss_sum


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


def end_if_diverged(diverged: bool, progress: dict[str, Any]) -> None:
    """End the run if a loss has become infinite or "not a number", so that no such weights are saved."""
    if diverged:
        where = f"step {progress['step']} of epoch {progress['epoch']}"
        raise UserError(f"the loss is not finite at {where}: try a lower --lr; earlier checkpoints are as they were")


def finish_save(pending: list[Future], log: RunLogger) -> None:
    """Wait for the checkpoint that a thread may still be writing; delete all but the newest two."""
    while pending:
        pending.pop().result()  # raises what has gone wrong in the thread
    if log.rank == 0:
        for old in checkpoints_in(log.run_dir / "checkpoints")[:-2]:
            (old / ".metadata").unlink()  # first: without it, the rest is no checkpoint any more
            shutil.rmtree(old)


def save(
    config: Config,
    model: FSDPModule,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    log: RunLogger,
    group: dist.ProcessGroup,
    pending: list[Future],
    progress: dict[str, Any],
    loss_sum: torch.Tensor,
) -> None:
    """Save what the rest of the training depends on. All ranks call this: each writes the parts of the weights it has.

    There are no states of random generators in it, because all random numbers follow from seed, epoch, step and rank.
    """
    of_ranks = [torch.zeros_like(loss_sum) for _ in range(log.world_size)]
    dist.all_gather(of_ranks, loss_sum)
    loss_sums = torch.stack(of_ranks).tolist()  # of each rank, the sum of its losses in this epoch
    end_if_diverged(not all(map(math.isfinite, loss_sums)), progress)
    finish_save(pending, log)
    folder = log.run_dir / "checkpoints" / f"epoch{progress['epoch']:04}_step{progress['step']:07}"
    if log.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it saved here
    dist.barrier()
    rest = {
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "progress": progress | {"loss_sums": loss_sums},
        "settings": settings(config, config.batch_size * log.world_size),  # the flags, to refuse a run that has others
    }
    state = sharded_state(model, optimizer) | {"rest": json.dumps(rest)}
    # Without copying ahead on the GPU: the writing thread would do so on the first GPU, whichever GPU this rank has.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    if config.async_save:  # returns once this rank's parts are copied; the next step may change the weights
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
        assert isinstance(future, Future)
        future.add_done_callback(lambda done: None if done.exception() else write_checksums(folder, log.rank))
        pending.append(future)
    else:
        dcp.save(state, storage_writer=writer, process_group=group)
        write_checksums(folder, log.rank)
        finish_save(pending, log)


def sharded_state(model: FSDPModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return the parts of weights and optimizer state that this rank has: the same memory, not a copy.

    Before the first step an optimizer has no state. Then this call makes one, by a step with gradients of zero and a
    learning rate of zero.
    """
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def find_checkpoint(log: RunLogger, device: torch.device) -> Path | None:
    """Return the newest checkpoint that is complete and undamaged; None if there is none. All ranks call this."""
    found = [checkpoints_in(log.run_dir / "checkpoints")]
    dist.broadcast_object_list(found)  # all ranks take what rank 0 has found
    damaged: list[Path] = []
    for folder in reversed(found[0]):
        if any_rank([is_damaged(folder, log.rank, log.world_size)], device)[0]:
            damaged.append(folder)
            continue
        for bad in damaged if log.rank == 0 else []:
            warn(f"{bad} is damaged; continuing from {folder}")
            bad.rename(bad.with_suffix(".damaged"))  # otherwise it would count as one of the two that are kept
        return folder
    if damaged:
        raise UserError(f"all checkpoints in {log.run_dir / 'checkpoints'} are damaged: delete them to start afresh")
    return None


def load(
    config: Config,
    model: FSDPModule,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    log: RunLogger,
    folder: Path,
) -> dict[str, Any]:
    """Continue from a checkpoint, perhaps of another number of ranks; return its progress. All ranks call this."""
    found = {"rest": ""}
    dcp.load(found, checkpoint_id=folder)  # first this part alone: is it of the same run?
    rest = json.loads(found["rest"])
    check_same_run(rest["settings"], settings(config, config.batch_size * log.world_size), folder)
    parts = sharded_state(model, optimizer)  # says which parts this rank needs; dcp.load fills them
    dcp.load(parts, checkpoint_id=folder)
    set_model_state_dict(model, parts["model"])
    set_optimizer_state_dict(model, optimizer, parts["optimizer"])
    scheduler.load_state_dict(rest["scheduler"])
    scaler.load_state_dict(rest["scaler"])
    return rest["progress"]


@profile
def train_one_epoch(
    config: Config,
    model: FSDPModule,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    log: RunLogger,
    progress: dict[str, Any],
    save_now: Callable[[dict[str, Any], torch.Tensor], None],
) -> float | None:
    """Train for one epoch, each rank on its own samples; return the mean loss over the samples of all ranks.

    ``progress`` says where the run is: the epoch, the steps taken in it, and the sum of this rank's losses. The latter
    two are 0 unless the run was stopped within this epoch. If the job is to stop now, all is saved, and None returned.
    """
    model.train()
    loss_sum = torch.tensor(progress["loss_sum"], device=device)
    for inputs, targets in log.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        # Dropout's random numbers follow from step and rank: different on each rank, and the same in a resumed run.
        torch.manual_seed(hash((config.seed, progress["epoch"], progress["step"], log.rank)))
        loss = train_step(config, model, optimizer, scaler, inputs, targets)
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        progress["step"] += 1
        stop = False
        if progress["step"] % config.log_interval == 0 and not config.benchmark:
            value = loss.item()  # here, every --log_interval steps, the CPU waits for the device
            diverged, stop = any_rank([not math.isfinite(value), stop_requested], device)
            end_if_diverged(diverged, progress)
            log.log_step(progress["epoch"], progress["step"], value)
        if stop or (config.save_interval and progress["step"] % config.save_interval == 0):
            save_now(progress, loss_sum)
        if stop:
            return None
    dist.all_reduce(loss_sum)  # the sum over all ranks
    end_if_diverged(not math.isfinite(loss_sum.item()), progress)
    return loss_sum.item() / loader.batch_sampler.samples_per_epoch  # without those that are left out


def same_steps(loader: Loader, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield batches (inputs, targets) and whether they count: some ranks have one batch less, and repeat their last.

    With DDP a rank could be done earlier. Here it must call the model as often as all others, because each call gathers
    weights from every rank.
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
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> float:
    """Return the mean loss over the validation samples of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    for inputs, targets, counts in same_steps(loader, device):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        loss = loss_function(model(inputs).float(), targets)
        if counts:
            loss_sum += loss * len(targets)
    dist.all_reduce(loss_sum)
    return loss_sum.item() / len(loader.dataset)


def log_text(model: nn.Module, dataset: TextDataset, config: Config, val_loss: float, log: RunLogger) -> None:
    """Say how many bits the model needs for a byte of the validation text, and print a text that it writes.

    A loss of x means that coding a byte takes x / ln 2 bits. All ranks call this, because each call of the model
    gathers weights from all of them.
    """
    if log.rank == 0:
        validated = dataset.tokens[: len(dataset) * dataset.sequence_length].numpy().tobytes()
        xz = 8 * len(lzma.compress(validated, preset=9)) / len(validated)
        bits = val_loss / math.log(2)
        log.log_summary(
            f"validation: {bits:.3f} bits per byte; xz -9 needs {xz:.3f}, and a byte of unknown text 8",
            bits_per_byte=bits,
            xz_bits_per_byte=xz,
        )
    if config.sample:
        text = write_text(model, config, log.device)
        log.print(f"the model writes:\n{text}")


@torch.no_grad()
def write_text(model: nn.Module, config: Config, device: torch.device) -> str:
    """Return ``config.sample`` bytes that the model writes, drawn one after the other; rank 0 draws for all ranks."""
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length of the text
    written = torch.tensor([[ord("\n")]], device=device)
    torch.manual_seed(config.seed)
    for _ in range(config.sample):
        scores = model(written[:, -config.sequence_length :])[:, -1].float()
        byte = torch.multinomial(F.softmax(scores / 0.8, dim=-1), 1)  # below 1, it keeps more to what is likely
        dist.broadcast(byte, src=0)
        written = torch.cat([written, byte], dim=1)
    return bytes(written[0, 1:].tolist()).decode(errors="replace")


@record  # under torchrun, the log ends with the error of the rank that failed first
def main(config: Config) -> None:
    """Join the other ranks, train with them, and destroy the process group at the end."""
    rank, local_rank, world_size = ranks_from_env()
    device = device_of_rank(local_rank)
    # Since PyTorch 2.15 "nccl" is a new backend, in which all-reduces may not overlap with backward: take the former.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    # Wait until all ranks have joined at MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun) listens.
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",  # NVIDIA's library between GPUs, gloo between CPUs
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if world_size == 1 else None,  # a single rank joins nobody, and needs no address
        timeout=timedelta(minutes=config.timeout_minutes),  # if a rank is waited for longer than this, the job ends
        device_id=device if device.type == "cuda" else None,  # lets NCCL connect now, not in the first step
    )
    signal.signal(signal.SIGUSR1, request_stop)
    # From here on, --batch_size is the number of samples per rank, also if --global_batch_size was given.
    config = replace(config, batch_size=batch_size_per_rank(config, world_size))
    config = replace(config, precision=choose_precision(config.precision, device))  # "auto" becomes bf16 or fp32
    finished = train(config, rank, world_size, device)
    dist.barrier()  # a rank that leaves while others still send or save can be taken for a lost one
    dist.destroy_process_group()
    if not finished and rank == 0 and "SLURM_JOB_ID" in os.environ:  # back into the queue; it continues in a later job
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)


def train(config: Config, rank: int, world_size: int, device: torch.device) -> bool:
    """Build what is needed, then train for ``config.epochs`` epochs; validate and save a checkpoint after each.

    Returns: Whether all epochs are done; False if the job is to stop before.
    """
    check_compute_options(config, device)  # ends the run with one line if the device lacks an option
    # TF32: products of float32 matrices read only the first 10 bits of each number's fraction. Off unless asked for.
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.manual_seed(config.seed + rank)  # the weights are those of rank 0
    train_loader = make_loader(config, "train", rank, world_size)
    val_loader = make_loader(config, "val", rank, world_size)
    global_batch_size = config.batch_size * world_size
    check_parts(config, len(train_loader.dataset), len(val_loader.dataset), world_size)
    model = shard_model(config, rank, device, world_size)
    if config.compile != "off":
        model.compile(dynamic=False)  # for this shape of batches; gathering weights stays outside of what is compiled
    optimizer = make_optimizer(config, model)  # after sharding: an earlier one would update weights that are gone
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    total_steps = config.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda number: lr_factor(config, number, total_steps))
    progress: dict[str, Any] = {"epoch": 1, "step": 0, "loss_sum": 0.0}
    save_group = dist.new_group(backend="gloo")  # of its own, because a thread may save while training goes on
    pending: list[Future] = []

    with RunLogger(config, device, rank, world_size, tokens_per_sample=config.sequence_length) as log:
        save_now = partial(save, config, model, optimizer, scheduler, scaler, log, save_group, pending)
        if config.mfu:  # the operations of the model, and the fastest product of matrices on this device
            size = gpt_size(config.model, config.width, config.depth)
            flops = config.sequence_length * size.flops_per_token(config.sequence_length)
            log.log_utilization(utilization(config, flops, device))
        if config.benchmark:  # loading alone (IO), training alone (SYNTHETIC), and both together (FULL)

            def train_on(batches: Loader) -> None:
                start = progress | {"step": 0}
                train_one_epoch(config, model, batches, optimizer, scheduler, scaler, device, log, start, save_now)

            mfu = log.mfu if config.mfu else None
            seconds = config.benchmark_seconds
            benchmark(train_loader, train_on, device, config.loader, log.run_dir, seconds, mfu=mfu)
            return True
        folder = find_checkpoint(log, device) if config.resume else None
        if folder is not None:  # this run was stopped before
            progress = load(config, model, optimizer, scheduler, scaler, log, folder)
            sums = progress.pop("loss_sums")
            if len(sums) != world_size:  # other ranks than before: one of them takes all that was added up
                sums = [math.fsum(sums)] + [0.0] * (world_size - 1)
            progress["loss_sum"] = sums[rank]
            log.print(f"resumed from {folder}: epoch {progress['epoch']}, after step {progress['step']}")
            if progress["epoch"] > config.epochs:
                log.print(f"nothing is left to do: --epochs is {config.epochs}")
        first_epoch = progress["epoch"]
        for epoch in range(first_epoch, config.epochs + 1):
            # A new order of the samples, the same on all ranks; in a run that was stopped within the epoch, without
            # those it has trained on.
            train_loader.batch_sampler.set_epoch(epoch, start_step=progress["step"])
            samples = max(0, train_loader.batch_sampler.samples_per_epoch - progress["step"] * global_batch_size)
            started = time.perf_counter()
            train_loss = train_one_epoch(
                config, model, train_loader, optimizer, scheduler, scaler, device, log, progress, save_now
            )
            if train_loss is None:
                finish_save(pending, log)
                log.print(f"stopped and saved in epoch {epoch}; --resume true continues after step {progress['step']}")
                return False
            seconds = time.perf_counter() - started
            val_loss = evaluate(config, model, val_loader, device)
            end_if_diverged(not math.isfinite(val_loss), progress)
            lr = scheduler.get_last_lr()[0]
            log.log_epoch(epoch, seconds, samples, lr, train_loss, val_loss, None)  # rank 0 alone prints
            progress.update(epoch=epoch + 1, step=0, loss_sum=0.0)
            save_now(progress, torch.zeros((), device=device))
            if epoch < config.epochs and any_rank([stop_requested], device)[0]:
                finish_save(pending, log)
                log.print(f"stopped after epoch {epoch}; --resume true continues from there")
                return False
        finish_save(pending, log)
        if progress["epoch"] > first_epoch:
            log_text(model, val_loader.dataset, config, val_loss, log)
        return True


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
