"""One frozen dataclass is the configuration: its fields are the command-line flags and the keys of the YAML files."""

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import jsonargparse
import yaml

from workshop.distributed import first_on_node
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import default_data_dir

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The flags that every lesson understands."""

    dataset: Literal["mnist", "cifar10"] = "mnist"
    """data set to train on"""
    data_dir: Path = field(default_factory=default_data_dir)
    """folder that holds the data sets (default: $WORKSHOP_DATA, else data/ of the repository)"""
    run_dir: Path | None = None
    """folder for this run's record (default: lesson and run name under $WORKSHOP_RUNS, else runs/ of the repository)"""
    model: str = "mnist_cnn"
    """model to train"""
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
    fused: bool = False
    """let the optimizer update all weights in one kernel; adadelta cannot"""
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
    """record a few training steps, operator by operator, into the run folder; show which operators take most time"""
    monitor: bool = False
    """watch CPUs, memory and GPU: curves in TensorBoard, mean and max in summary.json"""

    def __post_init__(self) -> None:
        counts = (
            "batch_size",
            "epochs",
            "log_interval",
            "save_interval",
            "prefetch_factor",
            "limit_train",
            "limit_val",
        )
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} must be at least 1, got {value}")
        if self.num_workers < 0:
            raise UserError(f"--num_workers must be 0 (load in the training process) or more, got {self.num_workers}")
        if self.fused and self.optimizer == "adadelta":
            raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
        if not self.benchmark_seconds > 0:
            raise UserError(f"--benchmark_seconds must be above 0, got {self.benchmark_seconds}")
        if not self.lr > 0:
            raise UserError(f"--lr must be above 0, got {self.lr}")


C = TypeVar("C", bound=TrainConfig)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known name most like ``name``, or all known names when none is alike."""
    known = sorted(known)
    alike = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]}?" if alike else f"known are: {', '.join(known)}"


def load_config(config_class: type[C], arguments: list[str], description: str | None = None) -> C:
    """Build the configuration from ``[--config FILE ...] [--KEY VALUE ...]``.

    Later files win over earlier ones, and flags win over files wherever they stand on the line. ``--trace`` alone means
    ``--trace true``. ``--help`` shows the ``description``.

    Raises:
        UserError: an unknown key or flag, a value of the wrong type or range, or a file that cannot be read.
    """
    files_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files_parser.add_argument("--config", action="append", default=[])
    try:
        found, flags = files_parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(_explain(str(error), {})) from None
    known = {f.name for f in dataclasses.fields(config_class)}
    keys_of = {file: _keys(file) for file in found.config}
    for file, keys in keys_of.items():
        for key in keys - known:
            raise UserError(f"{file}: unknown key '{key}'; {nearest(key, known)}")
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if flag.startswith("--") and name not in known | {"help", "print_config"}:
            raise UserError(f"unknown flag --{name}; {nearest(f'--{name}', (f'--{key}' for key in known))}")
    switches = {f"--{f.name}" for f in dataclasses.fields(config_class) if f.type is bool}
    flags = list(_with_true_after(switches, flags))

    parser = jsonargparse.ArgumentParser(exit_on_error=False, description=description)
    parser.add_argument("--config", action="config", help="YAML file of flags; may be given more than once")
    parser.add_class_arguments(config_class)
    files = [part for file in found.config for part in ("--config", file)]
    try:
        values = parser.parse_args(files + flags).as_dict()
    except argparse.ArgumentError as error:
        raise UserError(_explain(str(error), keys_of)) from None
    del values["config"]
    return config_class(**values)


def run_with_config(main: Callable[[C], None], config_class: type[C]) -> None:
    """Run a lesson's ``main`` with the configuration of the command line; tell a user's mistake in one line."""

    def parse_and_run() -> None:
        try:
            config = load_config(config_class, sys.argv[1:], description=main.__globals__["__doc__"])
        except UserError as error:
            error.told = not first_on_node()  # the others here were given the same flags
            raise
        main(config)

    run_reporting_user_errors(parse_and_run)


def _with_true_after(switches: set[str], flags: list[str]) -> Iterator[str]:
    for flag, following in pairwise([*flags, "--"]):
        yield flag
        if flag in switches and following.startswith("--"):
            yield "true"


def _keys(file: str) -> set[str]:
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {file}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold lines of the form 'key: value', found a {type(content).__name__}")
    return {str(key) for key in content}


def _explain(message: str, keys_of: dict[str, set[str]]) -> str:
    """Say in the user's words what the parser found wrong, and in which file if it was in one."""
    wrong = re.search(r'key "(\w+)":\s*Expected an? (.*)\. Got value: (.*)', message, re.DOTALL)
    if not wrong:
        return re.sub(r"argument (--\w+): expected one argument", r"\1 needs a value", message)
    key, expected, value = wrong.groups()
    expected = re.sub(r"<class '(\w+)'>", r"\1", expected)
    expected = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", expected)
    where = "".join(f" (in {file})" for file, keys in keys_of.items() if key in keys)
    return f"--{key} takes {expected}, got '{value}'{where}"
