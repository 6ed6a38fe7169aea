"""The flags that lessons share, in groups, and how they are read. A lesson names its groups, and adds its own flags:

    @dataclass(frozen=True, kw_only=True)
    class Config(ImageFlags, OptimizerFlags, LessonFlags):
        dataset: Literal["mnist", "cifar10"] = "mnist"
        lr_decay: float = 0.7

The fields are the command-line flags and the keys of the YAML files. A lesson has no flag that its script does not use.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import jsonargparse

from workshop.errors import UserError, launched_rank, run_reporting_user_errors
from workshop.paths import check_clone, default_data_dir

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

C = TypeVar("C", bound="LessonFlags")


def may_change(default: Any) -> Any:  # noqa: ANN401
    """Return the field of a flag that may change on resume: after the same steps, the weights do not depend on it."""
    return field(default=default, metadata={"may_change": True})


def require_positive(flags: Any, *names: str) -> None:  # noqa: ANN401
    """Raise `UserError` unless the attributes ``names`` of ``flags`` are above 0 where they are not None."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:  # "not above 0" also where it is not a number
            raise UserError(f"--{name} must be {'at least 1' if type(value) is int else 'above 0'}, got {value}")
        if value is not None and value >= 2**63:
            raise UserError(f"--{name} must be below 2**63, got {value}")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A group of flags."""

    def __post_init__(self) -> None:
        """Raise `UserError` for a value out of range, or for flags that exclude each other."""

    def without_effect(self) -> dict[str, str]:
        """Return the flags that would change nothing beside the others, and what each needs.

        `load_config` refuses such a flag on the command line, and another value than the usual one in a file.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class DataFlags(Flags):
    """The flags of the data and of its loader."""

    dataset: str
    """data set to train on"""
    data_dir: Path = field(default_factory=default_data_dir, metadata={"may_change": True})
    """folder that holds the data sets (default: $WORKSHOP_DATA, else data/ of the repository)"""
    loader: str
    """kind of data loader"""
    batch_size: int = may_change(64)
    """samples per step and process"""
    num_workers: int = may_change(1)
    """number of loader workers (with dali: threads); 0: load in the training process"""
    prefetch_factor: int = may_change(2)
    """number of batches that each worker prefetches"""
    persistent_workers: bool = may_change(True)
    """keep the workers alive between epochs"""
    pin_memory: bool = may_change(True)
    """put batches into pinned (page-locked) memory, for faster copies to a GPU"""
    non_blocking: bool = may_change(True)
    """copy to the GPU asynchronously, so that copies overlap with other work"""
    limit_train: int | None = None
    """number of training samples to use (default: all)"""
    limit_val: int | None = may_change(None)
    """number of validation samples to use (default: all)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "batch_size", "prefetch_factor", "limit_train", "limit_val")
        if self.num_workers < 0:
            raise UserError(f"--num_workers must be 0 (load in the training process) or more, got {self.num_workers}")


@dataclass(frozen=True, kw_only=True)
class RunFlags(Flags):
    """The flags of a run: how long it is, what it writes, what it measures."""

    run_dir: Path | None = may_change(None)
    """folder for the files of this run (default: lesson and run name in $WORKSHOP_RUNS, else in runs/)"""
    epochs: int = may_change(1)
    """number of passes over the training data"""
    seed: int = 1
    """seed of weights, sample order and augmentation"""
    log_interval: int = may_change(100)
    """number of steps between log lines"""
    save_interval: int | None = may_change(None)
    """number of steps between checkpoints within an epoch (default: only one after each epoch)"""
    resume: bool = may_change(False)
    """continue from the checkpoint in the run folder, if there is one"""
    benchmark: bool = may_change(False)
    """measure the speed of loading and training, alone and together, instead of training"""
    benchmark_seconds: float = may_change(1.0)
    """seconds of each trial of --benchmark"""
    trace: bool = may_change(False)
    """record a trace of a few steps in the run folder; plot and summarize it"""
    start_times: bool = may_change(False)
    """print what takes how long until the first step has ended"""
    monitor: bool = may_change(False)
    """monitor CPUs, memory and GPU: curves in TensorBoard, mean and maximum in summary.json"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "epochs", "log_interval", "save_interval", "benchmark_seconds")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed must be 0 or more, and below 2**63, got {self.seed}")
        if self.benchmark and self.save_interval:
            raise UserError("--benchmark true trains on nothing that is worth saving: leave out --save_interval")


@dataclass(frozen=True, kw_only=True)
class LessonFlags(DataFlags, RunFlags):
    """The flags of every lesson. Each lesson says which data sets, loaders, models and optimizers it has."""

    model: str
    """model to train"""
    lr: float
    """learning rate, above 0"""
    optimizer: str
    """optimizer"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "lr")


@dataclass(frozen=True, kw_only=True)
class ImageFlags(Flags):
    """The flags of a classifier of images."""

    model: str = "mnist_cnn"
    """model to train"""
    dropout: bool = True
    """dropout layers in the model (false: none)"""
    loader: Literal["map", "shards", "memory", "device", "dali"] = "map"
    """kind of data loader"""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags(Flags):
    """The flags of the optimizer."""

    lr: float = 1e-3
    """learning rate, above 0"""
    optimizer: Literal["sgd", "adam", "adamw", "adadelta"] = "adam"
    """optimizer, with PyTorch's defaults; sgd has momentum 0.9"""


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags(Flags):
    """The flags of the learning rate over the steps of a run: scaling, warm-up, cosine."""

    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """scaling of --lr with the global batch size, relative to --base_batch_size"""
    base_batch_size: int = 64
    """global batch size for which --lr was chosen"""
    warmup: float = 0.1
    """length of the warm-up as a share of all steps, from 0 to below 1"""
    warmup_steps: int | None = None
    """number of warm-up steps, instead of --warmup"""
    min_lr: float = 0.0
    """learning rate at the end of the schedule, as a share of the peak"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "base_batch_size")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise UserError(f"--warmup_steps must be 0 (none) or more, got {self.warmup_steps}")
        if not 0 <= self.min_lr <= 1:
            raise UserError(f"--min_lr is a share of the peak, from 0 to 1, got {self.min_lr}")


@dataclass(frozen=True, kw_only=True)
class RanksFlags(Flags):
    """The flags of a job of several ranks."""

    global_batch_size: int | None = None
    """samples per step over all ranks, shared equally; overrides --batch_size"""
    timeout_minutes: float = may_change(10.0)
    """minutes that a rank waits for the others, longer than saving, validation and compilation"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "global_batch_size", "timeout_minutes")


@dataclass(frozen=True, kw_only=True)
class DDPFlags(Flags):
    """The options of DistributedDataParallel."""

    bucket_cap_mb: float | None = None
    """largest size of DDP's gradient buckets in MiB (default: PyTorch's 25, the first one 1)"""
    gradient_as_bucket_view: bool = False
    """make the gradients views into DDP's buckets: saves the memory of one copy"""
    static_graph: bool = False
    """declare the autograd graph the same in every step, so that DDP optimizes more"""
    forward_sync_buffers: bool = True
    """broadcast rank 0's buffers, such as batch norm's statistics, before each forward pass"""
    sync_gradients: bool = True
    """false: no communication, to measure its cost; each rank then trains its own model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "bucket_cap_mb")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb > 1e6:
            raise UserError(f"--bucket_cap_mb is in MiB, at most a million, got {self.bucket_cap_mb}")
        if self.static_graph and not self.sync_gradients:
            raise UserError("--static_graph true learns the graph during communication: it needs --sync_gradients true")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Shows a script's docstring with its line breaks."""


def load_config(config_class: type[C], arguments: list[str], description: str | None = None) -> C:
    """Build the configuration from ``[--config FILE ...] [--KEY VALUE ...]``.

    A flag wins over every file, wherever it stands; of two files, and of a flag that is given twice, the later one.

    Raises UserError: an unknown key or flag, a value of the wrong type or range, a flag that would change nothing, or a
    file that cannot be read.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False, description=description, formatter_class=HelpFormatter)
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file of flags; flags on the command line override it; may be repeated",
    )
    parser.add_class_arguments(config_class)
    files, flags = files_and_flags(arguments)
    try:
        values = parser.parse_args([*(f"--config={file}" for file in files), *flags]).as_dict()
        in_order = parser.parse_args(arguments).as_dict()
        typed = parser.parse_args(flags, defaults=False).as_dict()
    except (argparse.ArgumentError, TypeError) as error:
        where = " or in ".join(["on the command line", *files])
        raise UserError(f"{error} ({where}); --help lists the flags") from None
    del values["config"]
    overruled = [name for name in values if in_order[name] != values[name]]
    if launched_rank() == "0":
        for name in overruled:  # such as the --num_workers of a job file
            print(f"--{name} {values[name]} wins over {name}: {in_order[name]} of a later --config", flush=True)
    config = config_class(**values)
    usual = parser.get_defaults()
    for name, needs in config.without_effect().items():
        if name in typed or values[name] != usual[name]:  # a file may list all flags, as --print_config does
            raise UserError(f"--{name} {values[name]} {needs}")
    return config


def files_and_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the files of ``--config FILE`` or ``--config=FILE``, and the other arguments."""
    files, flags = [], []
    words = iter(arguments)
    for word in words:
        if word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        elif word == "--config" and (file := next(words, None)) is not None:
            files.append(file)
        else:
            flags.append(word)
    return files, flags


def run_with_config(main: Callable[[C], None], config_class: type[C], description: str | None) -> None:
    """Run a script's ``main`` with the configuration of the command line; report a user's mistake in one line."""

    @functools.wraps(main)
    def parse_and_run() -> None:
        check_clone(Path(sys.modules[main.__module__].__file__ or ""))
        config = load_config(config_class, sys.argv[1:], description)
        if getattr(config, "start_times", False):  # a checker of flags has none
            from workshop.start import time_start  # here, because it imports torch: --help does not need it

            time_start(main)
        main(config)

    run_reporting_user_errors(parse_and_run)


def settings(config: LessonFlags, global_batch_size: int) -> dict[str, str]:
    """Return the flags that a checkpoint stores: those that must not change on resume.

    The samples of a step must be the same, so the global batch size counts and not the batch size of a rank.
    """
    fixed = [flag.name for flag in dataclasses.fields(config) if "may_change" not in flag.metadata]
    flags = {name: str(getattr(config, name)) for name in fixed}
    if config.loader == "shards":  # each rank, and each of its workers, reads shards of its own
        flags |= {"batch_size": str(config.batch_size), "num_workers": str(config.num_workers)}
    return flags | {"global_batch_size": str(global_batch_size)}


def check_same_run(saved: dict[str, str], mine: dict[str, str], file: Path) -> None:
    """Raise `UserError` if a checkpoint's `settings` differ from those of this run."""
    for name in sorted(saved.keys() | mine.keys()):
        if saved.get(name) != mine.get(name):
            what = "a global batch size of" if name == "global_batch_size" else f"--{name}"
            raise UserError(
                f"{file} was saved with {what} {saved.get(name)}, but now it is {mine.get(name)}: resume with the "
                "same value, or start a new run with another --run_dir"
            )
