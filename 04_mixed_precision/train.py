"""Lesson 04: lesson 03 with fewer bits, fewer kernels and fewer launches: precision, fusion, compilation, CUDA graphs.

    python train.py --precision bf16 --channels_last true      # one rank, anywhere
    python train.py --config ../configs/mnist.yaml --config ../configs/mnist_fast.yaml       # MNIST, everything on
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml     # a small 3D U-Net
    python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_opt.yaml      # on a GPU: the full one

You should see what lesson 03 shows, with losses that hardly differ, and with more samples per second where the hardware
computes in 16 bits. Start several ranks with torchrun, as in lesson 03.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
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

from checks import check_one_shape, check_options
from optimizer_state import load_optimizer
from workshop.checks import check_volumes, warn_if_emulated
from workshop.commandline import run_with_config
from workshop.config import TrainConfig, require_positive
from workshop.distributed import AllReduceCounter, failure_detector, int_from_env, rendezvous, started_by_srun
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
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: round what matrix products read; bf16, fp16: compute in half as many bits where autocast says it is safe"""
    channels_last: bool = False
    """keep the channels of a pixel side by side in memory, as fast convolutions need them"""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """let torch.compile fuse operations into fewer kernels; the modes after default take longer to do it"""
    cuda_graph: bool = False
    """on an NVIDIA GPU: record one training step, then launch all its kernels at once"""
    cudnn_benchmark: bool = False
    """on an NVIDIA GPU: let cuDNN try its algorithms for each shape of convolution and keep the fastest"""
    fused: bool = False
    """let the optimizer update all weights in one kernel; adadelta cannot"""
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
        require_positive(self, "global_batch_size", "base_batch_size", "bucket_cap_mb")
        require_positive(self, "crop_size", "train_crops", "val_crops", "unet_width", "unet_depth")
        require_positive(self, "vit_patch", "vit_width", "vit_depth")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb > 1e6:
            raise UserError(f"--bucket_cap_mb is in MiB, at most a million, got {self.bucket_cap_mb}")
        if self.static_graph and not self.sync_gradients:
            raise UserError("--static_graph true learns the graph during communication: it needs --sync_gradients true")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")
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


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which operations compute in 16 bits where that is safe; with fp32 and tf32 disabled."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""trains on a batch (inputs, targets) that is on the device already, and returns its loss ()"""


@profile
def train_step(
    config: Config,
    ddp_model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Train on one batch and return its loss.

    Nothing here waits for the device (in fp16: if the optimizer is fused), so a CUDA graph can record all of it.
    """
    optimizer.zero_grad()
    with record_function("forward"), autocast(config.precision, inputs.device):
        outputs = ddp_model(inputs)
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
        """Run what is inside on the stream to be recorded, after all before it and before all that comes after it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def train(self, step: Step, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Do what ``step`` does: the first times by calling it, then by recording it, and from then on by replaying."""
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
        assert inputs.shape == self.inputs.shape, "batches of several shapes, in spite of check_one_shape"
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.loss

    def close(self) -> None:
        """Free the graph."""
        self.graph = None


def state_of(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, scaler: torch.amp.GradScaler
) -> dict[str, Any]:
    """Return what a checkpoint holds; `Run.save` adds the epoch, the step and the states of the random generators."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
    }


@profile
def train_one_epoch(
    config: Config,
    ddp_model: nn.Module,
    loader: Loader,
    step: Step,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
    state: Callable[[], dict[str, Any]],
) -> float:
    """Train for one epoch, each rank on its own samples; return the mean loss over the samples of all ranks."""
    ddp_model.train()
    loss_sum = torch.tensor(run.partial_loss_sum, device=device)  # 0, unless this run was stopped within this epoch
    for inputs, targets in run.batches(loader):  # the batches of the loader; measures how long each is waited for
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        loss = step(inputs, targets)  # train_step, or the CUDA graph of it
        scheduler.step()
        loss_sum += loss.detach() * len(targets)  # on the device: loss.item() would make the CPU wait in every step
        run.end_step(loss)  # every --log_interval steps it prints the loss: only there the CPU waits for the device
        if run.should_save():  # every --save_interval steps, or because a signal asks this run to stop
            run.save(state(), loss_sum)  # called by all ranks; may end the run
    dist.all_reduce(loss_sum)  # the sum over all ranks
    return loss_sum.item() / loader.batch_sampler.samples_per_epoch  # without those that are left out


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float | None]:
    """Return the mean loss and the share of correct answers, which volumes do not have, over the validation samples."""
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
    check_options(config, device)  # ends the run with one line if the device lacks an option
    warn_if_emulated(config.precision, device)
    set_precision(config.precision, config.cudnn_benchmark)
    torch.manual_seed(config.seed + rank)  # a different seed on each rank: otherwise dropout would be the same on all
    train_loader = make_loader(config, "train", device, rank, world_size)
    val_loader = make_loader(config, "val", device, rank, world_size)
    memory_format = torch.contiguous_format
    if config.channels_last:  # the outputs of a layer get the format of its weights
        memory_format = torch.channels_last_3d if config.dataset == "nbody" else torch.channels_last
    model = make_model(config).to(device, memory_format=memory_format)
    global_batch_size = config.batch_size * world_size
    if config.cuda_graph:
        check_one_shape(len(train_loader.dataset), global_batch_size, world_size)
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
    step: Step = partial(train_step, config, compiled, optimizer, scaler)
    if graph:
        step = partial(graph.train, step)
    total_steps = config.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda number: lr_factor(config, global_batch_size, number, total_steps))
    state = partial(state_of, model, optimizer, scheduler, scaler)

    # The graph must be closed also if the run is stopped: NCCL cannot destroy its communicator while a graph holds it.
    with closing(graph) if graph else nullcontext(), Run(config, device, rank, world_size) as run, maybe_no_sync:
        if config.mfu:  # the operations of the model, and the fastest product of matrices on this device
            run.measure_mfu(partial(make_model, config))
        if config.benchmark:
            benchmark(config, compiled, train_loader, step, scheduler, device, run, state)
            return
        checkpoint = run.load_checkpoint(matching=state())
        if checkpoint is not None:  # --resume true, and this run was stopped before
            model.load_state_dict(checkpoint["model"])  # on every rank: DDP has already copied the weights of rank 0
            load_optimizer(optimizer, checkpoint["optimizer"])  # keeps what --fused and --cuda_graph need
            scheduler.load_state_dict(checkpoint["scheduler"])
            scaler.load_state_dict(checkpoint["scaler"])
        for epoch in range(run.next_epoch, config.epochs + 1):
            train_loader.batch_sampler.set_epoch(epoch)  # a new order of the samples, the same on all ranks
            started = time.perf_counter()
            train_loss = train_one_epoch(config, compiled, train_loader, step, scheduler, device, run, state)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            if rank == 0:  # all ranks have the same results, so one of them prints
                run.log_summary(str(counter), **counter.per_step())
                run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            run.save(state())  # every rank adds its random state; rank 0 writes


def benchmark(
    config: Config,
    ddp_model: nn.Module,
    loader: Loader,
    step: Step,
    scheduler: LRScheduler,
    device: torch.device,
    run: Run,
    state: Callable[[], dict[str, Any]],
) -> None:
    """Measure the throughput of loading alone (IO), of training alone (SYNTHETIC), and of both together (FULL)."""

    def train_on(batches: Loader) -> None:
        train_one_epoch(config, ddp_model, batches, step, scheduler, device, run, state)

    run.benchmark(loader, train_on)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
