"""The flags, in groups. A lesson's configuration is one frozen dataclass made of the groups it needs:

    class Config(TrainConfig, DDPFlags): ...

Its fields are the command-line flags and the keys of the YAML files. No group knows another one; what only matters
where two of them meet is checked there.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workshop.errors import UserError
from workshop.paths import default_data_dir


class Flags:
    """Where the groups' ``__post_init__``, each of which calls the next one, end: with what holds for all numbers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            limit = {int: 2**63 - 1, float: 3.4028234663852886e38}.get(type(value))
            if limit and not abs(value) <= limit:
                raise UserError(f"--{name} must be a number of at most {limit:.2g}, got {value}")

    def require_positive(self, *names: str) -> None:
        """Raise `UserError` unless these flags are above 0 where they are set; whole numbers then are at least 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name} must be {'at least 1' if type(value) is int else 'above 0'}, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Flags):
    """The flags of every lesson."""

    dataset: Literal["mnist", "cifar10"] = "mnist"
    """data set to train on"""
    data_dir: Path = field(default_factory=default_data_dir)
    """folder that holds the data sets (default: $WORKSHOP_DATA, else data/ of the repository)"""
    run_dir: Path | None = None
    """folder for this run's record (default: lesson and run name under $WORKSHOP_RUNS, else runs/ of the repository)"""
    model: str = "mnist_cnn"
    """model to train"""
    dropout: bool = True
    """false: train the model without its dropout layers, and without the random numbers that these draw"""
    loader: Literal["map", "shards", "memory", "device", "dali"] = "map"
    """how samples reach the training loop"""
    batch_size: int = 64
    """samples per step and process"""
    num_workers: int = 1
    """processes (with dali: threads) that prepare batches; 0 loads in the training process itself"""
    prefetch_factor: int = 2
    """batches that each worker prepares ahead"""
    persistent_workers: bool = True
    """keep the workers from one epoch to the next"""
    pin_memory: bool = True
    """put batches into memory that the GPU can copy from directly; without a GPU this changes nothing"""
    non_blocking: bool = True
    """let copies to the GPU overlap with the work after them"""
    epochs: int = 1
    """passes over the training data"""
    lr: float = 1e-3
    """learning rate"""
    optimizer: Literal["sgd", "adam", "adamw", "adadelta"] = "adam"
    """optimizer"""
    seed: int = 1
    """seed of weights, sample order and augmentation"""
    log_interval: int = 100
    """steps between two log lines"""
    limit_train: int | None = None
    """train on this many samples only"""
    limit_val: int | None = None
    """validate on this many samples only"""
    save_interval: int | None = None
    """steps between two checkpoints within an epoch (default: none; there is one after each epoch)"""
    resume: bool = False
    """go on from the checkpoint in the run folder, if there is one"""
    benchmark: bool = False
    """instead of training, measure how fast loading and training are, alone and together"""
    benchmark_seconds: float = 1.0
    """length of each of its trials"""
    trace: bool = False
    """record a few training steps, operator by operator, into the run folder; draw them; show what takes most time"""
    monitor: bool = False
    """watch CPUs, memory and GPU: curves in TensorBoard, mean and max in summary.json"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("batch_size", "epochs", "log_interval", "save_interval", "prefetch_factor")
        self.require_positive("limit_train", "limit_val", "benchmark_seconds", "lr")
        if self.seed < 0:
            raise UserError(f"--seed must be 0 or more, got {self.seed}")
        if self.num_workers < 0:
            raise UserError(f"--num_workers must be 0 (load in the training process) or more, got {self.num_workers}")


@dataclass(frozen=True, kw_only=True)
class DDPFlags(Flags):
    """The flags of training with several processes."""

    global_batch_size: int | None = None
    """samples per step over all ranks; if given, it is shared among them, whatever --batch_size says"""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """how --lr, meant for steps of base_batch_size samples, grows with the global batch"""
    base_batch_size: int = 64
    """the global batch that --lr is meant for"""
    warmup: float = 0.1
    """share of all steps in which the learning rate rises from almost nothing"""
    bucket_cap_mb: float | None = None
    """gradients travel in buckets of at most so many MiB (default: PyTorch's 25, the first one 1)"""
    gradient_as_bucket_view: bool = False
    """let the gradients live in the buckets instead of being copied there: saves memory for one set of them"""
    static_graph: bool = False
    """promise that every step uses the same parameters in the same way, which lets DDP prepare more"""
    forward_sync_buffers: bool = True
    """before each forward pass, give all ranks the buffers (such as batch norm's statistics) of rank 0"""
    sync_gradients: bool = True
    """false: no communication, to measure what it costs; each rank then trains on its own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("global_batch_size", "base_batch_size", "bucket_cap_mb")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb > 1e6:
            raise UserError(f"--bucket_cap_mb is in MiB, at most a million, got {self.bucket_cap_mb}")
        if self.static_graph and not self.sync_gradients:
            raise UserError("--static_graph true has DDP learn the graph while it communicates: --sync_gradients true")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(Flags):
    """The flags of how a training step is computed."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: round what matrix products read; bf16, fp16: compute in half as many bits where autocast says it is safe"""
    channels_last: bool = False
    """keep the channels of a pixel side by side in memory, as fast convolutions want them"""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """have torch.compile fuse operations into fewer kernels; the modes after default take longer to do it"""
    cuda_graph: bool = False
    """on an NVIDIA GPU: record one training step, then launch all its kernels at once"""
    cudnn_benchmark: bool = False
    """on an NVIDIA GPU: let cuDNN try its algorithms for each shape of convolution and keep the fastest"""
    fused: bool = False
    """let the optimizer update all weights in one kernel; adadelta cannot"""


@dataclass(frozen=True, kw_only=True)
class VolumeFlags(Flags):
    """The flags of training on volumes: how boxes are cut into samples, and how large the U-Net is."""

    crop_size: int = 64
    """with nbody: edge, in cells, of the cubes that are cut from the boxes at random"""
    train_crops: int = 512
    """with nbody: cubes that make up an epoch"""
    val_crops: int = 64
    """with nbody: cubes to validate on, the same ones every time"""
    width: int = 64
    """with unet3d: channels after the first layer; deeper layers have more"""
    depth: int = 6
    """with unet3d: how many times it halves the edge of the volume"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("crop_size", "train_crops", "val_crops", "width", "depth")
