"""Lesson 04: lesson 03 with fewer bits, fewer kernels and fewer launches: precision, fusion, compilation, CUDA graphs.

    python train.py --channels_last true                                                     # one rank, anywhere
    python train.py --config ../configs/mnist.yaml --config ../configs/mnist_fast.yaml       # MNIST, everything on
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml     # a small 3D U-Net
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_opt.yaml      # on a GPU: the full one

You should see what lesson 03 shows, with losses that hardly differ, and with more samples per second where the hardware
computes in 16 bits; a line says which precision was chosen. Start several ranks with torchrun, as in lesson 03.
"""

import math
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workshop.checks import check_compute_options, choose_precision
from workshop.config import (
    DDPFlags,
    ImageFlags,
    LessonFlags,
    OptimizerFlags,
    RanksFlags,
    ScheduleFlags,
    check_same_run,
    may_change,
    require_positive,
    run_with_config,
)
from workshop.errors import UserError, warn
from workshop.hardware import cpu_or_error
from workshop.loaders import (
    DistributedBatchSampler,
    ImageDataset,
    Loader,
    VolumeDataset,
    build_loader,
    build_volume_loader,
)
from workshop.log import Log
from workshop.models import build_model
from workshop.models.unet3d import UNet3D
from workshop.profiling import profile
from workshop.profiling.all_reduce_counter import AllReduceCounter
from workshop.profiling.mfu import model_flops, sample_shape, utilization
from workshop.profiling.monitor import monitoring
from workshop.profiling.throughput import benchmark
from workshop.profiling.trace import tracing
from workshop.ranks import Ranks
from workshop.run import RunFolder
from workshop.seeds import seed_generators


@dataclass(frozen=True, kw_only=True)
class Config(ImageFlags, OptimizerFlags, ScheduleFlags, RanksFlags, DDPFlags, LessonFlags):
    """The flags of this lesson, in addition to those of its groups."""

    dataset: Literal["mnist", "cifar10", "nbody"] = "mnist"
    """data set to train on"""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """number format: tf32, or bf16 or fp16 with autocast; auto: bf16 if supported, else fp32"""
    channels_last: bool = False
    """channels_last memory format, as fast convolution kernels need it"""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """mode of torch.compile, which fuses operations; the modes after default compile longer"""
    cuda_graph: bool = False
    """on an NVIDIA GPU: record one training step, then launch all its kernels at once"""
    cudnn_benchmark: bool = False
    """on an NVIDIA GPU: let cuDNN time its convolution algorithms and keep the fastest"""
    fused: bool = False
    """let the optimizer update all weights in one kernel; adadelta cannot"""
    mfu: bool = may_change(False)
    """measure the peak of this device first, and log the model FLOPs utilization"""
    crop_size: int = 64
    """with nbody: edge of the random crops, in cells"""
    train_crops: int = 512
    """with nbody: number of random crops in an epoch"""
    val_crops: int = 64
    """with nbody: number of crops to validate on, always the same ones"""
    unet_width: int = 64
    """with unet3d: channels after the first layer; deeper layers have more"""
    unet_depth: int = 6
    """with unet3d: number of times that it halves the edge of the volume"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "crop_size", "train_crops", "val_crops", "unet_width", "unet_depth")
        check_volumes(self)

    def without_effect(self) -> dict[str, str]:
        """Return the flags that would change nothing with this data set, and what each needs."""
        if self.dataset == "nbody":
            return {"dropout": "needs a model that has dropout: unet3d has none"}
        volumes = f"needs --dataset nbody, not {self.dataset}: give --config configs/unet3d.yaml before other files"
        return dict.fromkeys(("crop_size", "train_crops", "val_crops", "unet_width", "unet_depth"), volumes)


def check_volumes(config: Config) -> None:
    """Raise `UserError` unless data set and model belong together, and the U-Net can halve its volumes."""
    if config.dataset != "nbody":
        if config.model == "unet3d":
            raise UserError(f"--model unet3d maps volumes to volumes: it needs --dataset nbody, not {config.dataset}")
        return
    if config.model != "unet3d":
        raise UserError("--dataset nbody holds volumes, and only --model unet3d maps volumes to volumes")
    if config.crop_size % 2**config.unet_depth:
        near = max(round(config.crop_size / 2**config.unet_depth), 1) * 2**config.unet_depth
        raise UserError(
            f"--crop_size {config.crop_size} cannot be halved {config.unet_depth} times; take --crop_size {near}, or a "
            "smaller --unet_depth"
        )


def check_cuda_graph(config: Config, ranks: Ranks, num_samples: int) -> None:
    """Raise `UserError` unless a training step can be captured as a CUDA graph with this config.

    Args:
        config: of the run; ``batch_size`` is the batch size of a rank.
        ranks: this process among all.
        num_samples: size of the training data.
    """
    if config.compile not in ("off", "default"):
        raise UserError(
            f"--compile {config.compile} makes CUDA graphs of its own: with --cuda_graph, --compile default"
        )
    if config.loader == "dali":
        raise UserError("--cuda_graph true: DALI's threads may wait for the GPU during capture; use --loader device")
    if not config.fused and (config.optimizer == "sgd" or config.precision == "fp16"):
        raise UserError(
            f"--cuda_graph true with --optimizer {config.optimizer} and --precision {config.precision} needs --fused "
            "true: otherwise this optimizer makes the CPU wait for the GPU in each step, which a graph cannot"
        )
    rest = num_samples % (config.batch_size * ranks.world_size)
    if rest >= ranks.world_size:  # fewer are left out
        raise UserError(
            f"--cuda_graph true needs every batch of one shape: {num_samples} samples leave a last batch of {rest}; "
            f"use --limit_train {num_samples - rest}"
        )


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

    There are no states of random generators in it, because all random numbers follow from seed, epoch, step and rank.
    """

    model: DistributedDataParallel
    compiled: nn.Module
    """the same model, as training calls it: compiled, if that was asked for"""
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler
    ranks: Ranks
    graph: "GraphedStep | None" = None
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of the training depends on. All ranks call this."""
        return {
            "model": self.model.module.state_dict(),  # DDP puts "module." before the name of every weight
            "optimizer": self.optimizer.state_dict(),  # Adam, for example, keeps two averages for each weight
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": progress_of_all_ranks(self.progress, self.ranks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned, on every rank: DDP broadcasts weights only once."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # a CUDA graph reads the learning rate on the device
            if isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"].to(self.ranks.device)
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.progress = progress_of_this_rank(state["progress"], self.ranks)


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
    """Return the loader of this rank's batches (inputs, targets) of a split, "train" or "val"."""
    if config.loader != "map" and config.dataset != "nbody":
        return build_loader(config, split, ranks)  # shards, memory, device or dali, as in lesson 01
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    if config.dataset == "nbody":
        crops = config.train_crops if training else config.val_crops
        dataset = VolumeDataset(config.data_dir, split, config.crop_size, crops, limit, seed=config.seed)
        if config.loader == "map" and ranks.rank == 0:  # the other loaders check when they read the whole file
            dataset.check_values()  # ends the run with one line if some are not finite numbers
    else:
        dataset = ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)
    # Every rank shuffles in the same way and takes every world_size-th sample of each global batch. In training, the
    # last global batch is left out if it has fewer samples than there are ranks. For its training data, a script of
    # your own can use DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, world_size, rank)), with the
    # sampler of torch.utils.data, and call its set_epoch(epoch). Not for validation: it repeats samples until all ranks
    # have equally many, and these would count twice.
    sampler = DistributedBatchSampler(
        len(dataset),
        config.batch_size,
        rank=ranks.rank,
        num_replicas=ranks.world_size,
        shuffle=training,
        seed=config.seed,
    )
    if config.loader != "map":
        assert isinstance(dataset, VolumeDataset)
        return build_volume_loader(config, dataset, sampler, ranks.device)
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
    if config.model == "unet3d":
        return UNet3D(config.unet_width, config.unet_depth)
    return build_model(config.model, config.dataset, dropout=config.dropout)


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the optimizer that was chosen, over the weights of ``model``, which are on the device already."""
    parameters = list(model.parameters())
    # A CUDA graph reads the learning rate on the device; the number "initial_lr" saves the schedule a kernel per step.
    groups = [{"params": parameters, "initial_lr": config.lr}]
    lr = torch.tensor(config.lr, device=parameters[0].device) if config.cuda_graph else config.lr
    fused = config.fused or None  # one kernel for all weights; None: PyTorch chooses
    capturable = config.cuda_graph  # keep the counters of the steps on the device too
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused)
        if fused:  # if the first step in fp16 overflows, the momentum must be zeros, not what was in memory before
            optimizer.state |= {weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in parameters}
        return optimizer
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=fused, capturable=capturable)
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(groups, lr=lr, capturable=capturable)
    return torch.optim.Adam(groups, lr=lr, fused=fused, capturable=capturable)


def lr_factor(config: Config, *, global_batch_size: int, step: int, total_steps: int) -> float:
    """Return the factor on --lr in ``step`` of ``total_steps``, counted from 0: it rises, then falls as a cosine."""
    ratio = global_batch_size / config.base_batch_size
    scale = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    warmup = int(config.warmup * total_steps) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return scale * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))
    return scale * (config.min_lr + (1 - config.min_lr) * cosine)


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the samples: of the absolute error for volumes, of the cross-entropy for classes."""
    return F.l1_loss(outputs, targets) if targets.is_floating_point() else F.cross_entropy(outputs, targets)


def set_precision(precision: str, cudnn_benchmark: bool) -> None:
    """Set PyTorch's process-wide switches: TF32, and cuDNN's search for the fastest algorithm."""
    # By default, PyTorch rounds to TF32 on NVIDIA GPUs in convolutions, but not in matrix products. Its newer switches,
    # named fp32_precision, are not used: after them, parts of PyTorch fail that still read these older ones.
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.benchmark = cudnn_benchmark


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which operations compute in 16 bits where that is safe; with fp32 and tf32 disabled."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def memory_format_of(config: Config) -> torch.memory_format:
    """Return the order in which the numbers of images or volumes, and of weights, lie in memory."""
    if not config.channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if config.dataset == "nbody" else torch.channels_last


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""trains on a batch (inputs, targets) that is on the device already, and returns its loss ()"""


@profile
def train_step(config: Config, training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Train on one batch and return its loss.

    Nothing here waits for the device (in fp16: if the optimizer is fused), so a CUDA graph can record all of it.
    """
    model, optimizer, scaler = training.compiled, training.optimizer, training.scaler
    optimizer.zero_grad()
    with record_function("forward"), autocast(config.precision, inputs.device):
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
    with record_function("backward"):  # outside of autocast: each operation uses the format of its forward pass
        # In fp16 small gradients would become zero, so the loss is multiplied by a large factor. Otherwise: by 1.
        scaler.scale(loss).backward()
    with record_function("optimizer"):
        scaler.step(optimizer)  # divides the gradients by the factor, and leaves out the step if any has overflowed
        scaler.update()  # a smaller factor after an overflow, a larger one after many steps without
    return loss


class GraphedStep:
    """A training step that is recorded once as a CUDA graph, and then launched as a whole instead of kernel by kernel.

    A graph replays the same kernels on the same addresses. So each batch is copied to where the recorded one would have
    been, and the loss always appears in the same tensor: read it, or add it up, before the next step. What the step
    decides in Python is decided once. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    EAGER_STEPS = 11
    """steps that DistributedDataParallel must take before it can be recorded, according to PyTorch's documentation"""

    def __init__(self) -> None:
        self.steps = 0
        # Nothing can be recorded on the default stream. DDP must be built on the stream that is recorded, and take its
        # first steps there; these are ordinary training steps, so no batch is used twice.
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the body on the stream to be recorded, ordered after all earlier work and before all later work."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def train(self, step: Step, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Do a training step: call ``step`` the first times, then record it, and from then on replay it."""
        assert self.graph is not None, "a step after close()"
        self.steps += 1
        if self.steps <= self.EAGER_STEPS:
            with self.on_stream():
                return step(inputs, targets)
        if self.steps == self.EAGER_STEPS + 1:
            self.inputs, self.targets = torch.empty_like(inputs), torch.empty_like(targets)
            # thread_local: other threads, which pin batches or watch over NCCL, may call CUDA while this one records
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = step(self.inputs, self.targets)  # recorded only: nothing is computed here
        assert inputs.shape == self.inputs.shape, "batches of several shapes, in spite of check_cuda_graph"
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.loss

    def close(self) -> None:
        """Free the graph."""
        self.graph = None


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


def save(training: Training, log: Log) -> None:
    """Save all that the rest of the training depends on. All ranks call this; rank 0 writes the file."""
    diverged = any_rank([not math.isfinite(training.progress.loss_sum)], training.ranks)[0]
    end_if_diverged(diverged, training.progress)
    state = training.state_dict() | {"settings": log.folder.settings}  # the flags, to refuse a run with other flags
    if training.ranks.rank == 0:
        save_checkpoint(log.folder.path / "checkpoint.pt", state)


def resume(training: Training, log: Log) -> None:
    """Continue from the newest checkpoint in the run's folder, if there is one. Rank 0 finds it; all ranks read it."""
    found = [find_checkpoint(log.folder.path / "checkpoint.pt") if training.ranks.rank == 0 else None]
    dist.broadcast_object_list(found)  # from rank 0
    file = found[0]
    if file is None:
        log.print(f"no checkpoint in {log.folder.path}: training begins at step 0")
        return
    state = torch.load(file, map_location="cpu", weights_only=True)
    check_same_run(state["settings"], log.folder.settings, file)
    training.load_state_dict(state)
    log.print(f"resumed from {file}: epoch {training.progress.epoch}, after step {training.progress.step}")


@profile
def train_one_epoch(config: Config, training: Training, loader: Loader, log: Log) -> float | None:
    """Train for one epoch, each rank on its own samples; return the mean loss over the samples of all ranks.

    If the run was stopped within this epoch, ``training.progress`` says after which step. If the job is to stop now,
    all is saved, and None returned.
    """
    scheduler, graph, step = training.scheduler, training.graph, partial(train_step, config, training)
    progress, ranks, device = training.progress, training.ranks, training.ranks.device
    memory_format = memory_format_of(config)
    training.model.train()
    loss_sum = torch.tensor(progress.loss_sum, device=device)
    checks = Checks(ranks)
    log.start_epoch(loader)
    for inputs, targets in loader:
        log.start_step()  # the loop has waited for this batch until now
        inputs = inputs.to(device, non_blocking=config.non_blocking, memory_format=memory_format)
        targets = targets.to(device, non_blocking=config.non_blocking)
        # Dropout's random numbers follow from step and rank: different on each rank, and the same in a resumed run.
        seed_generators(device, config.seed, progress.epoch, progress.step, ranks.rank)
        loss = graph.train(step, inputs, targets) if graph else step(inputs, targets)
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        progress.count += len(targets)
        progress.step += 1
        stop = False
        log_now = progress.step % config.log_interval == 0
        if (checks.due() or log_now) and not config.benchmark:
            value = loss.item()  # here, every --log_interval steps or some seconds, the CPU waits for the device
            diverged, stop = checks.agree(not math.isfinite(value), stop_requested)
            end_if_diverged(diverged, progress)
            if log_now:
                log.log_step(progress, value)
        if stop or (config.save_interval and progress.step % config.save_interval == 0):
            progress.loss_sum = loss_sum.item()
            save(training, log)
        if stop:
            return None
        log.end_step()
    count = torch.tensor(progress.count, device=device)
    for sum_of_rank in (loss_sum, count):  # after this, the sums over all ranks
        dist.all_reduce(sum_of_rank)
    end_if_diverged(not math.isfinite(loss_sum.item()), progress)
    return loss_sum.item() / max(1, count.item())


@torch.inference_mode()
def evaluate(config: Config, training: Training, loader: Loader) -> tuple[float, float | None]:
    """Return the mean loss and the share of correct answers, which volumes do not have, over the validation samples."""
    model, device = training.model.module, training.ranks.device
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        with autocast(config.precision, device):
            outputs = model(inputs)
            loss_sum += loss_function(outputs, targets) * len(targets)
        if config.dataset != "nbody":
            correct += (outputs.argmax(dim=1) == targets).sum()
    for sum_of_rank in (loss_sum, correct):  # after the loop: some ranks may have had one batch more than others
        dist.all_reduce(sum_of_rank)
    accuracy = None if config.dataset == "nbody" else correct.item() / len(loader.dataset)
    return loss_sum.item() / len(loader.dataset), accuracy


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
    set_precision(config.precision, config.cudnn_benchmark)
    torch.manual_seed(config.seed + ranks.rank)  # DDP gives all ranks the weights of rank 0
    train_loader = make_loader(config, "train", ranks)
    val_loader = make_loader(config, "val", ranks)
    model = make_model(config).to(device, memory_format=memory_format_of(config))
    if config.cuda_graph:
        check_cuda_graph(config, ranks, len(train_loader.dataset))
    graph = GraphedStep() if config.cuda_graph else None
    with graph.on_stream() if graph else nullcontext():
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
    # Compiled after DDP was built, as PyTorch's documentation advises: what is compiled is cut where DDP's buckets end.
    # dynamic=False: for this shape of batches.
    compiled = ddp_model if config.compile == "off" else torch.compile(ddp_model, mode=config.compile, dynamic=False)
    optimizer = make_optimizer(config, model)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    total_steps = config.epochs * len(train_loader)
    global_batch_size = config.batch_size * ranks.world_size

    def factor(step: int) -> float:
        return lr_factor(config, global_batch_size=global_batch_size, step=step, total_steps=total_steps)

    training = Training(ddp_model, compiled, optimizer, LambdaLR(optimizer, factor), scaler, ranks, graph)

    # The graph must be closed also if the run is stopped: NCCL cannot destroy its communicator while a graph holds it.
    with (
        closing(graph) if graph else nullcontext(),
        RunFolder(config, ranks) as folder,
        Log(folder) as log,
        tracing(log),
        monitoring(log),
        maybe_no_sync,
    ):
        if config.mfu:  # the operations of the model, and the fastest product of matrices on this device
            flops = model_flops(partial(make_model, config), sample_shape(config))
            log.log_utilization(utilization(config, flops, device))
        if config.benchmark:  # loading alone (IO), training alone (SYNTHETIC), and both together (FULL)

            def train_on(batches: Loader) -> None:
                train_one_epoch(config, replace(training, progress=Progress()), batches, log)

            benchmark(log, train_loader, train_on)
            return True
        if config.resume:
            resume(training, log)
        if training.progress.epoch > config.epochs:
            log.print(f"nothing is left to do: --epochs is {config.epochs}")
        for epoch in range(training.progress.epoch, config.epochs + 1):
            # A new order of the samples, the same on all ranks; in a run that was stopped within the epoch, without
            # those it has trained on.
            train_loader.batch_sampler.set_epoch(epoch, start_step=training.progress.step)
            samples = max(0, train_loader.batch_sampler.samples_per_epoch - training.progress.step * global_batch_size)
            started = time.perf_counter()
            train_loss = train_one_epoch(config, training, train_loader, log)
            if train_loss is None:
                step = training.progress.step
                log.print(f"stopped and saved in epoch {epoch}; --resume true continues after step {step}")
                return False
            trained = time.perf_counter()
            val_loss, val_accuracy = evaluate(config, training, val_loader)
            end_if_diverged(not math.isfinite(val_loss), training.progress)
            log.log_summary(str(counter), **counter.per_step())
            log.log_epoch(  # rank 0 alone prints
                epoch,
                train_loss=train_loss,
                val_loss=val_loss,
                val_accuracy=val_accuracy,
                lr=training.scheduler.get_last_lr()[0],
                samples=samples,
                seconds=trained - started,
                val_seconds=time.perf_counter() - trained,
            )
            training.progress = Progress(epoch + 1)
            save(training, log)
            if epoch < config.epochs and any_rank([stop_requested], ranks)[0]:
                log.print(f"stopped after epoch {epoch}; --resume true continues from there")
                return False
        return True


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
