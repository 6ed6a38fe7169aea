"""What the device at hand and the options of lesson 05 do not allow is refused here, in one line."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn

from workshop.checks import check_compiler, check_precision, this_is
from workshop.errors import UserError


class Options(Protocol):
    """The flags that are checked here."""

    @property
    def precision(self) -> str: ...  # noqa: D102
    @property
    def cudnn_benchmark(self) -> bool: ...  # noqa: D102
    @property
    def compile(self) -> str: ...  # noqa: D102
    @property
    def fused(self) -> bool: ...  # noqa: D102
    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def loader(self) -> str: ...  # noqa: D102
    @property
    def accumulate(self) -> int: ...  # noqa: D102
    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def shard(self) -> str: ...  # noqa: D102
    @property
    def activation_checkpointing(self) -> bool: ...  # noqa: D102


Flags = TypeVar("Flags", bound=Options)


def check_options(options: Flags, make_model: Callable[[Flags], nn.Module], device: torch.device) -> None:
    """Raise `UserError` unless ``device`` has all options that were chosen, and they can be combined."""
    if options.fused and options.optimizer == "adadelta":
        raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
    if options.fused and options.optimizer == "sgd":
        raise UserError(
            "--fused true: PyTorch's fused SGD does not accept sharded weights; use --optimizer adam or adamw, or "
            "--fused false"
        )
    check_precision(options.precision, device)
    if options.cudnn_benchmark and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {this_is(device)}")
    if options.compile != "off":
        check_compiler(device)
    if options.accumulate > 1 and options.loader == "shards":
        raise UserError(
            f"--accumulate {options.accumulate} cannot be combined with --loader shards: on some ranks an epoch may "
            "end with a batch of fewer samples than parts; use --loader memory, or map"
        )
    with torch.device("meta"):
        model = make_model(options)
    if not any(isinstance(layers, nn.ModuleList) for layers in model.children()):
        what = f"--model {options.model} has no blocks, which this lesson looks for in an nn.ModuleList"
        if options.shard != "root":
            raise UserError(f"{what}: nothing would be sharded one by one; use --model vit, or --shard root")
        if options.activation_checkpointing:
            raise UserError(f"{what}: nothing would be computed again; use --model vit")


def check_parts(accumulate: int, num_samples: int, global_batch_size: int, world_size: int) -> None:
    """Raise `UserError` unless every rank has at least one sample for each part of every batch of an epoch."""
    if global_batch_size < accumulate * world_size:
        raise UserError(
            f"--accumulate {accumulate} divides a batch of {global_batch_size // world_size} per rank into more parts "
            "than it has samples; use a smaller number, or a larger batch"
        )
    rest = num_samples % global_batch_size
    if world_size <= rest < accumulate * world_size:  # fewer than a sample per rank are left out
        raise UserError(
            f"--accumulate {accumulate}: {num_samples} samples leave a last batch of {rest}, which is less than one "
            f"sample for each part on each of {world_size} rank(s); use --limit_train {num_samples - rest}"
        )


def check_validation(num_samples: int, world_size: int) -> None:
    """Raise `UserError` unless every rank has at least one sample to validate on."""
    if num_samples < world_size:
        raise UserError(
            f"{num_samples} validation sample(s) for {world_size} ranks: every rank must call the model as often as "
            f"all others, so it needs at least one; use at least {world_size}, or fewer ranks"
        )
