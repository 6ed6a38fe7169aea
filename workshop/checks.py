"""What a device does not have, and flags that do not fit together, are refused here: with one line, before the run.

Lessons 04 and 05 share these checks; what only one of them refuses stands beside its script.
"""

import signal
from typing import Protocol

import torch

from workshop.errors import UserError, first_on_node, warn
from workshop.hardware import emulates
from workshop.signals import STOP_SIGNALS


class VolumeFlags(Protocol):
    """The flags that only ``--dataset nbody`` uses, and those that decide whether it is used."""

    @property
    def dataset(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def crop_size(self) -> int: ...  # noqa: D102
    @property
    def unet_depth(self) -> int: ...  # noqa: D102


NEED_NBODY = ("crop_size", "train_crops", "val_crops", "unet_width", "unet_depth")


def check_volumes(flags: VolumeFlags) -> None:
    """Raise `UserError` unless data set and model belong together, and the U-Net can halve its volumes."""
    if flags.dataset != "nbody":
        if flags.model == "unet3d":
            raise UserError(f"--model unet3d maps volumes to volumes: it needs --dataset nbody, not {flags.dataset}")
        for name in NEED_NBODY:
            value = getattr(flags, name)
            if value != getattr(type(flags), name):
                raise UserError(
                    f"--{name} {value} needs --dataset nbody, not {flags.dataset}; configs/unet3d.yaml and "
                    "configs/vit3d.yaml say so, and are given before the files with longer names"
                )
        return
    if flags.model not in ("unet3d", "vit"):
        raise UserError("--dataset nbody holds volumes, and only --model unet3d and --model vit map volumes to volumes")
    if flags.model == "unet3d" and flags.crop_size % 2**flags.unet_depth:
        halvings = (flags.crop_size & -flags.crop_size).bit_length() - 1
        near = max(round(flags.crop_size / 2**flags.unet_depth), 1) * 2**flags.unet_depth
        raise UserError(
            f"--crop_size {flags.crop_size} cannot be halved {flags.unet_depth} times; take --crop_size {near}"
            + (f", or --unet_depth {halvings}" if halvings else "")
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `UserError` unless ``device`` computes in that number format itself; a CPU may emulate it."""
    cuda = device.type == "cuda"
    ampere = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "tf32" and not ampere:
        raise UserError(f"--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; {this_is(device)}")
    if precision == "bf16" and cuda and emulates(device, "bf16"):
        raise UserError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or newer; {this_is(device)}: try --precision fp16"
            ", because PyTorch would only emulate bf16"
        )


def warn_if_emulated(precision: str, device: torch.device) -> None:
    """Warn if ``device`` has no instructions for the number format."""
    if first_on_node() and emulates(device, precision):
        reason = f"this CPU has no instructions for {precision} and emulates it"
        warn(f"{reason}, slower than --precision fp32 would be")


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` unless something small can be compiled.

    A trial is better than any list of what torch.compile needs. It starts the processes that compile from now on. They
    inherit that stop signals, which reach them too, are blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        torch.compile(torch.square)(torch.ones(2, device=device))
    except Exception as error:  # torch raises many types, some of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--compile: torch.compile does not work here: {reason}; it needs a C++ compiler such as g++, and on a GPU "
            "also Triton: install them, or use --compile off"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def this_is(device: torch.device) -> str:
    """Say which device this is, for a message."""
    return f"this is {torch.cuda.get_device_name(device) if device.type == 'cuda' else f'the {device.type.upper()}'}"
