"""Prepare a process in which torch has just been imported."""

import atexit
import os
import sys
import time
import traceback

import torch

from . import library
from .interface import Notice


def start() -> None:
    """Install what the options of the command ask for, if this process sees a null GPU."""
    # Not torch.cuda.is_available(): after it, a process that is forked cannot use the GPU.
    if library.load().nullgpu_gpus():
        install()
    else:  # CUDA_VISIBLE_DEVICES is empty, so this process computes on the CPU, unless it sets the variable itself
        torch.cuda._lazy_call(install)


def install() -> None:
    """Install what the options of the command ask for."""
    # A thread of autograd may still have to let go of a Python object. If it does so after the interpreter has begun to
    # end, PyTorch ends the process with "terminate called without an active exception".
    atexit.register(time.sleep, 0.03)
    use_own_cells()
    print_from_cpu()
    settings = library.settings()
    if settings.values:
        from . import values

        values.install()
    else:
        from . import zeros

        zeros.install()
    if settings.world:
        from . import world

        world.install(settings.world)
    if settings.clock:
        from . import clock

        clock.install(settings)
    if folder := os.environ.get("NULLGPU_REPORT"):
        from . import record

        record.install(folder)
    else:
        library.observe(say_where_if_missing, Notice.MISSING)


def use_own_cells() -> None:
    """Let recurrent networks take PyTorch's own kernels: cuDNN's need a layout of the weights that only cuDNN knows."""
    torch.nn.RNNBase.flatten_parameters = lambda self: None
    for kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        kind.forward = torch.backends.cudnn.flags(enabled=False)(kind.forward)


def print_from_cpu() -> None:
    """Let the numbers of a tensor be printed from a copy on the CPU: PyTorch chooses their format by kernels."""
    own = torch._tensor_str._tensor_str

    def numbers(tensor: torch.Tensor, indent: int) -> str:
        return own(tensor.cpu() if tensor.is_cuda and tensor.layout is torch.strided else tensor, indent)

    torch._tensor_str._tensor_str = numbers


def say_where_if_missing(kind: int, name: str, size: int, pageable: bool) -> None:
    """Print the Python stack before a function that the null GPU does not have ends the process."""
    if kind == Notice.MISSING:
        traceback.print_stack(file=sys.stderr)
