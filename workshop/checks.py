"""What a device does not have, and flags that do not fit together, are refused here: with one line, before the run."""

from typing import Any, Literal

import torch

from workshop.errors import UserError, first_on_node, warn
from workshop.hardware import computes_in

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
NEED_NBODY = ("crop_size", "train_crops", "val_crops", "unet_width", "unet_depth")


def check_volumes(flags: Any) -> None:  # noqa: ANN401
    """Raise `UserError` unless data set and model belong together, and the U-Net can halve its volumes."""
    if flags.dataset != "nbody":
        if flags.model == "unet3d":
            raise UserError(f"--model unet3d maps volumes to volumes: it needs --dataset nbody, not {flags.dataset}")
        for name in NEED_NBODY:
            if getattr(flags, name) != getattr(type(flags), name):
                raise UserError(
                    f"--{name} {getattr(flags, name)} needs --dataset nbody, not {flags.dataset}: give --config "
                    "configs/unet3d.yaml before other files"
                )
        return
    if flags.model != "unet3d":
        raise UserError("--dataset nbody holds volumes, and only --model unet3d maps volumes to volumes")
    if flags.crop_size % 2**flags.unet_depth:
        near = max(round(flags.crop_size / 2**flags.unet_depth), 1) * 2**flags.unet_depth
        raise UserError(
            f"--crop_size {flags.crop_size} cannot be halved {flags.unet_depth} times; take --crop_size {near}, or a "
            "smaller --unet_depth"
        )


def choose_precision(precision: Precision, device: torch.device) -> Precision:
    """Return the number format to compute in: for "auto" bf16 where the device computes in it, else fp32.

    Raises `UserError` if ``device`` lacks the format that was asked for. A format that a CPU emulates gives a warning.
    """
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "auto":
        chosen: Precision = "bf16" if ampere or computes_in(device, "bf16") else "fp32"
        if first_on_node():
            reason = "computes" if chosen == "bf16" else "is not known to compute"
            print(f"--precision auto: {chosen}, because {name_of(device)} {reason} in bf16 by itself", flush=True)
        return chosen
    if precision == "tf32" and not ampere:
        raise UserError(f"--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; {this_is(device)}")
    if precision == "bf16" and device.type == "cuda" and not ampere:
        raise UserError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or newer; {this_is(device)}: try --precision fp16"
        )
    if computes_in(device, precision) is False and first_on_node():
        warn(f"this CPU has no instructions for {precision} and emulates it, slower than --precision fp32 would be")
    return precision


def check_compute_options(flags: Any, device: torch.device) -> None:  # noqa: ANN401
    """Raise `UserError` unless ``device`` has the options that were chosen, and they can be combined."""
    if flags.fused and flags.optimizer == "adadelta":
        raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
    if getattr(flags, "cudnn_benchmark", False) and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {this_is(device)}")
    if flags.compile != "off":
        _check_compiler(device)


def check_cuda_graph(flags: Any, device: torch.device, num_samples: int, world_size: int) -> None:  # noqa: ANN401
    """Raise `UserError` unless a training step can be captured as a CUDA graph with these flags.

    Args:
        flags: of the run; ``batch_size`` is that of a rank.
        device: that trains.
        num_samples: size of the training data.
        world_size: number of ranks.
    """
    if device.type != "cuda":
        raise UserError(f"--cuda_graph true needs an NVIDIA GPU; {this_is(device)}")
    if flags.compile not in ("off", "default"):
        raise UserError(f"--compile {flags.compile} makes CUDA graphs of its own: with --cuda_graph, --compile default")
    if flags.loader == "dali":
        raise UserError("--cuda_graph true: DALI's threads may wait for the GPU during capture; use --loader device")
    if not flags.fused and (flags.optimizer == "sgd" or flags.precision == "fp16"):
        raise UserError(
            f"--cuda_graph true with --optimizer {flags.optimizer} and --precision {flags.precision} needs --fused "
            "true: otherwise this optimizer makes the CPU wait for the GPU in each step, which a graph cannot"
        )
    rest = num_samples % (flags.batch_size * world_size)
    if rest >= world_size:  # fewer are left out
        raise UserError(
            f"--cuda_graph true needs every batch of one shape: {num_samples} samples leave a last batch of {rest}; "
            f"use --limit_train {num_samples - rest}"
        )


def check_parts(flags: Any, num_train: int, num_val: int, world_size: int) -> None:  # noqa: ANN401
    """Raise `UserError` unless every rank has a sample for each part of every batch, and one to validate on.

    Args:
        flags: of the run; ``batch_size`` is that of a rank, which is divided into ``accumulate`` parts.
        num_train: size of the training data.
        num_val: size of the validation data.
        world_size: number of ranks.
    """
    parts, rest = flags.accumulate, num_train % (flags.batch_size * world_size)
    if flags.batch_size < parts:
        raise UserError(f"--accumulate {parts}: a batch of {flags.batch_size} per rank has fewer samples than parts")
    if world_size <= rest < parts * world_size:  # fewer than a sample per rank are left out
        raise UserError(
            f"--accumulate {parts}: {num_train} samples leave a last batch of {rest}, less than a sample for each part "
            f"on each of {world_size} rank(s); use --limit_train {num_train - rest}"
        )
    if num_val < world_size:
        raise UserError(f"{num_val} validation sample(s) for {world_size} ranks: each rank needs at least one")


def _check_compiler(device: torch.device) -> None:
    """Raise `UserError` unless something small can be compiled: a trial is better than a list of what it needs."""
    try:
        torch.compile(torch.square)(torch.ones(2, device=device))
    except Exception as error:  # torch raises many types, some of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--compile: torch.compile does not work here: {reason}; it needs a C++ compiler such as g++, and on a GPU "
            "also Triton: install them, or use --compile off"
        ) from None


def name_of(device: torch.device) -> str:
    """Return the name of a device, for a message."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"


def this_is(device: torch.device) -> str:
    """Say which device this is, for a message."""
    return f"this is {name_of(device)}"
