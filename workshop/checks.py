"""Refuse, in one line and before the run, options that the device lacks and flags that exclude each other."""

from typing import Any, Literal

import torch

from workshop.errors import UserError, first_on_node, warn
from workshop.hardware import computes_in

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


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
    for name in ("cuda_graph", "cudnn_benchmark"):
        if getattr(flags, name, False) and device.type != "cuda":
            raise UserError(f"--{name} true needs an NVIDIA GPU; {this_is(device)}")
    if flags.compile != "off":
        _check_compiler(device)


def _check_compiler(device: torch.device) -> None:
    """Raise `UserError` unless torch.compile works here: compile something small, as its requirements change."""
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
