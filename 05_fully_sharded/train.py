"""Lesson 05: lesson 04 with weights, gradients and optimizer state sharded over all ranks (FSDP2 in the place of DDP).

    torchrun --standalone --nproc-per-node 2 train.py         # two ranks on this machine; with Slurm: sbatch job.slurm
    python train.py                                           # one rank, anywhere
    python train.py --activation_checkpointing true --accumulate 4        # two ways to store less for backward

You should see the losses of lesson 04 with --model vit, and each rank stores only its part of the model. On CPUs it is
slower than lesson 04, because the ranks send the weights several times in each step.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from checks import check_options, check_parts, check_validation
from workshop.checks import check_volumes, warn_if_emulated
from workshop.commandline import run_with_config
from workshop.config import TrainConfig, require_positive
from workshop.distributed import failure_detector, int_from_env, rendezvous, started_by_srun
from workshop.errors import UserError
from workshop.hardware import cpu_or_error
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader, init_worker
from workshop.loaders.volumes import VolumeDataset, build_volume_loader
from workshop.models import build_model
from workshop.models.unet3d import UNet3D
from workshop.models.vit import build_vit
from workshop.profiling import profile
from workshop.run import Run


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, in addition to those that all lessons share."""

    dataset: Literal["mnist", "cifar10", "nbody"] = "mnist"  # type: ignore[assignment]  # one more than in lesson 01
    """data set to train on"""
    model: str = "vit"
    """model to train: vit, unet3d (with nbody), or a classifier as in lesson 01"""

    global_batch_size: int | None = None
    """samples per step over all ranks; if given, each rank gets an equal part of it, and --batch_size is ignored"""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """how --lr, which is meant for steps of base_batch_size samples, grows with the global batch size"""
    base_batch_size: int = 64
    """the global batch size that --lr is meant for"""
    warmup: float = 0.1
    """share of all steps in which the learning rate rises from almost zero, from 0 to below 1"""
    shard: Literal["blocks", "keep", "root"] = "blocks"
    """blocks: gather the weights of one block at a time; keep: the same, until backward; root: all weights at once"""
    activation_checkpointing: bool = False
    """store only the input of each block for backward, and compute the rest of the block again there"""
    accumulate: int = 1
    """number of parts of each batch that are computed one after the other; their gradients are added up"""
    max_grad_norm: float | None = None
    """scale the gradients down where their norm over all ranks is larger than this (default: never)"""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: round what matrix products read; bf16, fp16: send weights and compute in half as many bits"""
    compile: Literal["off", "default"] = "off"
    """let torch.compile fuse operations into fewer kernels"""
    cudnn_benchmark: bool = False
    """on an NVIDIA GPU: let cuDNN try its algorithms for each shape of convolution and keep the fastest"""
    fused: bool = False
    """let the optimizer update all weights in one kernel; adadelta cannot"""
    checkpoint_form: Literal["whole", "sharded"] = "whole"
    """whole: rank 0 gathers the model and writes one file; sharded: each rank writes its part into a folder"""
    async_save: bool = False
    """with sharded: copy the parts into CPU memory, and let a thread write them while training goes on"""
    mfu: bool = False
    """measure the peak of this device first, and log what share of it the operations of the model are"""
    crop_size: int = 64
    """with nbody: edge, in cells, of the cubes that are cut from the boxes at random places"""
    train_crops: int = 512
    """with nbody: number of cubes in an epoch"""
    val_crops: int = 64
    """with nbody: number of cubes to validate on, always the same ones"""
    unet_width: int = 64
    """with unet3d: channels after the first layer; deeper layers have more"""
    unet_depth: int = 6
    """with unet3d: how many times it halves the edge of the volume"""
    vit_patch: int = 7
    """with vit: edge of its patches in pixels or cells; it must divide the edge of a sample"""
    vit_width: int = 64
    """with vit: numbers that describe a patch, a multiple of 4; the number of weights grows with its square"""
    vit_depth: int = 4
    """with vit: number of transformer blocks"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "global_batch_size", "base_batch_size", "accumulate", "max_grad_norm")
        require_positive(self, "crop_size", "train_crops", "val_crops", "unet_width", "unet_depth")
        require_positive(self, "vit_patch", "vit_width", "vit_depth")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")
        if self.async_save and self.checkpoint_form != "sharded":
            raise UserError("--async_save true needs --checkpoint_form sharded")
        check_volumes(self)


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
    if config.loader != "map" and config.dataset != "nbody":
        return build_loader(config, split, device, rank, world_size)  # shards, memory, device or dali, as in lesson 01
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    if config.dataset == "nbody":
        crops = config.train_crops if training else config.val_crops
        dataset = VolumeDataset(config.data_dir, split, config.crop_size, crops, limit, seed=config.seed)
        if config.loader == "map" and rank == 0:  # the other loaders check the values when they read the whole file
            dataset.check_values()  # ends the run with one line if some are not finite numbers
    else:
        dataset = ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)
    # Every rank shuffles in the same way and takes every world_size-th sample of each global batch. In training, the
    # last global batch is left out if it has fewer samples than there are ranks. For its training data, a script of
    # your own can use DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, world_size, rank)), with the
    # sampler of torch.utils.data, and call its set_epoch(epoch). Not for validation: it repeats samples until all ranks
    # have equally many, and these would count twice.
    sampler = DistributedBatchSampler(
        len(dataset), config.batch_size, rank=rank, num_replicas=world_size, shuffle=training, seed=config.seed
    )
    if config.loader != "map":
        return build_volume_loader(config.loader, dataset, sampler, device, config.num_workers, config.pin_memory)
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


def make_model(config: Config) -> nn.Module:
    """Return the model with fresh weights."""
    if config.model == "unet3d":
        return UNet3D(config.unet_width, config.unet_depth)
    if config.model == "vit":
        return build_vit(config.dataset, config.crop_size, config.vit_patch, config.vit_width, config.vit_depth)
    return build_model(config.model, config.dataset, dropout=config.dropout)


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the optimizer that was chosen, over the weights of ``model``, which are sharded: so is then its state."""
    fused = config.fused or None  # one kernel for all weights; None: PyTorch chooses
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, fused=fused)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.lr, fused=fused)
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), lr=config.lr)
    return torch.optim.Adam(model.parameters(), lr=config.lr, fused=fused)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model that are gathered, and perhaps computed again, one by one."""
    return [block for layers in model.children() if isinstance(layers, nn.ModuleList) for block in layers]


def recomputed(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that stores only its input: backward calls it again when the activations are needed."""

    def forward_again(inputs: torch.Tensor) -> torch.Tensor:  # a function, because torch.compile skips a partial
        return checkpoint(forward, inputs, use_reentrant=False)

    return forward_again


def shard_model(config: Config, rank: int, device: torch.device, world_size: int) -> FSDPModule:
    """Return the model, of which each rank stores one part of every weight; rank 0 draws the initial weights."""
    with torch.device("meta"):  # shapes without memory: no device has to hold the whole model, not even once
        model = make_model(config)
    if config.activation_checkpointing:
        for block in blocks_of(model):  # the block's activations are computed again when backward needs them
            block.forward = recomputed(block.forward)
    mesh = init_device_mesh(device.type, (world_size,))  # the ranks in a row: all of them share each weight
    # Compute in 16 bits, but store weights, gradients and optimizer state in 32: small updates would be lost in 16.
    # This takes the place of autocast: the weights are sent in this format too, which halves their bytes.
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if config.shard != "root":
        for block in blocks_of(model):  # the weights of a block are gathered before it computes, and freed after it
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.shard == "blocks")
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)  # last: it takes the weights that are in no block
    sharded.to_empty(device=device)  # memory for this rank's parts, with random content
    initial = make_model(config).state_dict() if rank == 0 else {}  # in CPU memory of one rank
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, initial, options=options)  # gives each rank its part
    return sharded


def lr_factor(config: Config, global_batch_size: int, step: int, total_steps: int) -> float:
    """Return the factor on --lr in ``step`` of ``total_steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * total_steps)
    if step < warmup:
        return scale * (step + 1) / warmup
    return scale * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the samples: of the absolute error for volumes, of the cross-entropy for classes."""
    return F.l1_loss(outputs, targets) if targets.is_floating_point() else F.cross_entropy(outputs, targets)


def set_precision(precision: str, cudnn_benchmark: bool) -> None:
    """Set what PyTorch has one switch of for the whole process: TF32, and cuDNN's search for the fastest algorithm."""
    # By default, PyTorch rounds to TF32 on NVIDIA GPUs in convolutions, but not in matrix products. Its newer switches,
    # named fp32_precision, are not used: after them, parts of PyTorch fail that still read these older ones.
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.benchmark = cudnn_benchmark


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
            outputs = model(part)
            loss = loss_function(outputs.float(), part_targets) * (len(part) / len(inputs))  # parts may differ in size
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


def whole_state(model: FSDPModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return whole weights and optimizer state, in CPU memory of rank 0. All ranks call this: each sends its parts."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def sharded_state(model: FSDPModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return the parts of weights and optimizer state that this rank has: the same memory, not a copy.

    Before the first step an optimizer has no state. Then this call makes one, by a step with gradients of zero and a
    learning rate of zero.
    """
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save_checkpoint(
    config: Config,
    model: FSDPModule,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    run: Run,
    loss_sum: torch.Tensor | None = None,
) -> None:
    """Save all that the training consists of. All ranks call this, and it ends the run if a signal asks for that."""
    rest = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}  # equal on all ranks
    if config.checkpoint_form == "whole":
        run.save(whole_state(model, optimizer) | rest, loss_sum)  # every rank adds its random state; rank 0 writes
        return
    parts = sharded_state(model, optimizer)
    with run.save_sharded(parts, rest, loss_sum) as saving:  # the folder gets its name when all of it is on disk
        if config.async_save:  # returns once this rank's parts are copied; the next step may change the weights
            saving.future = dcp.async_save(parts, checkpoint_id=saving.folder, process_group=saving.group)
        else:
            dcp.save(parts, checkpoint_id=saving.folder, process_group=saving.group)


def load_checkpoint(
    config: Config,
    model: FSDPModule,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    run: Run,
) -> None:
    """With ``--resume true``, continue from the last checkpoint, if there is one, perhaps one of other ranks."""
    # These are only compared with the checkpoint, so they need not be gathered: the shape of a sharded weight is that
    # of the whole one. `sharded_state` must not be used for that: in a run that starts afresh, its step with gradients
    # of zero would be counted, and Adam corrects its running means by the number of steps.
    matching = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    matching |= {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
    if config.checkpoint_form == "whole":
        whole = run.load_checkpoint(matching)
        if whole is None:
            return
        options = StateDictOptions(full_state_dict=True)  # the file has whole weights; each rank takes its part
        set_model_state_dict(model, whole["model"], options=options)
        set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=options)
        scheduler.load_state_dict(whole["scheduler"])
        scaler.load_state_dict(whole["scaler"])
        return
    with run.load_sharded(matching) as saved:  # all its files have been compared with their checksums
        if saved is None:
            return
        parts = sharded_state(model, optimizer)  # says which parts this rank needs; dcp.load fills them
        dcp.load(parts, checkpoint_id=saved.folder, process_group=saved.group)
        saved.scale_lr(parts["optimizer"])  # if --lr is another one than before
        set_model_state_dict(model, parts["model"])
        set_optimizer_state_dict(model, optimizer, parts["optimizer"])
        scheduler.load_state_dict(saved.state["scheduler"])
        scaler.load_state_dict(saved.state["scaler"])


@profile
def train_one_epoch(
    config: Config,
    model: FSDPModule,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    run: Run,
) -> float:
    """Train for one epoch, each rank on its own samples; return the mean loss over the samples of all ranks."""
    model.train()
    loss_sum = torch.tensor(run.partial_loss_sum, device=device)  # 0, unless this run was stopped within this epoch
    for inputs, targets in run.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        loss = train_step(config, model, optimizer, scaler, inputs, targets)
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        run.end_step(loss)  # every --log_interval steps it prints the loss: only there the CPU waits for the device
        if run.should_save():  # every --save_interval steps, or because a signal asks this run to stop
            save_checkpoint(config, model, optimizer, scheduler, scaler, run, loss_sum)
    dist.all_reduce(loss_sum)  # the sum over all ranks
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


@torch.no_grad()  # not inference_mode: gathered weights would be of a kind that backward cannot use afterwards
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float | None]:
    """Return the mean loss and the share of correct answers, which volumes do not have, over the validation samples."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets, counts in same_steps(loader, device):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        outputs = model(inputs).float()
        if counts:
            loss_sum += loss_function(outputs, targets) * len(targets)
        if counts and config.dataset != "nbody":
            correct += (outputs.argmax(dim=1) == targets).sum()
    for sum_of_rank in (loss_sum, correct):
        dist.all_reduce(sum_of_rank)
    accuracy = None if config.dataset == "nbody" else correct.item() / len(loader.dataset)
    return loss_sum.item() / len(loader.dataset), accuracy


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
    check_options(config, make_model, device)  # ends the run with one line if the device lacks an option
    warn_if_emulated(config.precision, device)
    set_precision(config.precision, config.cudnn_benchmark)
    torch.manual_seed(config.seed + rank)  # a different seed on each rank: otherwise dropout would be the same on all
    train_loader = make_loader(config, "train", device, rank, world_size)
    val_loader = make_loader(config, "val", device, rank, world_size)
    global_batch_size = config.batch_size * world_size
    check_parts(config.accumulate, len(train_loader.dataset), global_batch_size, world_size)
    check_validation(len(val_loader.dataset), world_size)
    model = shard_model(config, rank, device, world_size)
    if config.compile != "off":
        model.compile(dynamic=False)  # for this shape of batches; gathering weights stays outside of what is compiled
    optimizer = make_optimizer(config, model)  # after sharding: an earlier one would update weights that are gone
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    total_steps = config.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda number: lr_factor(config, global_batch_size, number, total_steps))

    with Run(config, device, rank, world_size) as run:
        if config.mfu:  # the operations of the model, and the fastest product of matrices on this device
            run.measure_mfu(partial(make_model, config))
        if config.benchmark:
            benchmark(config, model, train_loader, optimizer, scheduler, scaler, device, run)
            return
        load_checkpoint(config, model, optimizer, scheduler, scaler, run)
        for group in optimizer.param_groups:
            if "fused" in group:  # the checkpoint holds that of the run that saved
                group["fused"] = config.fused or None
        for epoch in range(run.next_epoch, config.epochs + 1):
            train_loader.batch_sampler.set_epoch(epoch)  # a new order of the samples, the same on all ranks
            started = time.perf_counter()
            train_loss = train_one_epoch(config, model, train_loader, optimizer, scheduler, scaler, device, run)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            if rank == 0:  # all ranks have the same results, so one of them prints
                run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            save_checkpoint(config, model, optimizer, scheduler, scaler, run)


def benchmark(
    config: Config,
    model: FSDPModule,
    loader: Loader,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    run: Run,
) -> None:
    """Measure the throughput of loading alone (IO), of training alone (SYNTHETIC), and of both together (FULL)."""

    def train_on(batches: Loader) -> None:
        train_one_epoch(config, model, batches, optimizer, scheduler, scaler, device, run)

    run.benchmark(loader, train_on)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
