"""The flags that all lessons share. A lesson's script adds its own in a subclass:

    @dataclass(frozen=True, kw_only=True)
    class Config(TrainConfig):
        lr_decay: float = 0.7

The fields are the command-line flags and the keys of the YAML files.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workshop.errors import UserError
from workshop.paths import default_data_dir


def require_positive(flags: Any, *names: str) -> None:  # noqa: ANN401
    """Raise `UserError` unless the attributes ``names`` of ``flags`` are above 0 where they are not None."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} must be {'at least 1' if type(value) is int else 'above 0'}, got {value}")


def require_representable(flags: Any) -> None:  # noqa: ANN401
    """Raise `UserError` unless every number among the attributes of ``flags`` fits into int64 or float32."""
    for name, value in vars(flags).items():
        limit = {int: 2**63 - 1, float: 3.4028234663852886e38}.get(type(value))
        if limit and not abs(value) <= limit:
            raise UserError(f"--{name} must be a number of at most {limit:.2g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The flags of every lesson."""

    dataset: Literal["mnist", "cifar10"] = "mnist"
    """data set to train on"""
    data_dir: Path = field(default_factory=default_data_dir)
    """folder that holds the data sets (default: $WORKSHOP_DATA, else data/ of the repository)"""
    run_dir: Path | None = None
    """folder for the files of this run (default: lesson and run name in $WORKSHOP_RUNS, else in runs/)"""
    model: str = "mnist_cnn"
    """model to train"""
    dropout: bool = True
    """false: train the model without its dropout layers, and without the random numbers that they use"""
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
    """put batches into page-locked memory, which a GPU can copy from directly; without a GPU this changes nothing"""
    non_blocking: bool = True
    """let copies to the GPU overlap with the work after them"""
    epochs: int = 1
    """passes over the training data"""
    lr: float = 1e-3
    """learning rate, above 0"""
    optimizer: Literal["sgd", "adam", "adamw", "adadelta"] = "adam"
    """how the weights are updated, with PyTorch's defaults; sgd has momentum 0.9"""
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
    """continue from the checkpoint in the run folder, if there is one"""
    benchmark: bool = False
    """instead of training, measure how fast loading and training are, alone and together"""
    benchmark_seconds: float = 1.0
    """length of each trial of --benchmark"""
    trace: bool = False
    """record a few training steps, operator by operator, into the run folder; plot them; print what takes most time"""
    monitor: bool = False
    """measure the load of CPUs, memory and GPU: curves in TensorBoard, mean and maximum in summary.json"""

    def __post_init__(self) -> None:
        require_representable(self)
        require_positive(self, "batch_size", "epochs", "log_interval", "save_interval", "prefetch_factor")
        require_positive(self, "limit_train", "limit_val", "benchmark_seconds", "lr")
        if self.seed < 0:
            raise UserError(f"--seed must be 0 or more, got {self.seed}")
        if self.num_workers < 0:
            raise UserError(f"--num_workers must be 0 (load in the training process) or more, got {self.num_workers}")
