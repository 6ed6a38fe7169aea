"""What the device at hand and the options of lesson 04 do not allow is refused here, in one line."""

import signal
from typing import Protocol

import torch

from workshop.errors import UserError, first_on_node, warn
from workshop.hardware import emulates
from workshop.signals import STOP_SIGNALS


class Options(Protocol):
    """The flags that are checked here."""

    @property
    def precision(self) -> str: ...  # noqa: D102
    @property
    def cudnn_benchmark(self) -> bool: ...  # noqa: D102
    @property
    def cuda_graph(self) -> bool: ...  # noqa: D102
    @property
    def compile(self) -> str: ...  # noqa: D102
    @property
    def fused(self) -> bool: ...  # noqa: D102
    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def loader(self) -> str: ...  # noqa: D102


def check_options(options: Options, device: torch.device) -> None:
    """Raise `UserError` unless ``device`` has all options that were chosen, and they can be combined.

    A number format that works, but that the CPU emulates, gives a warning.
    """
    if options.fused and options.optimizer == "adadelta":
        raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
    _check_precision(options.precision, device)
    if options.cudnn_benchmark and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {_this_is(device)}")
    if options.cuda_graph:
        _check_cuda_graph(options, device)
    if options.compile != "off":
        _check_compiler(device)


def warn_if_emulated(options: Options, device: torch.device) -> None:
    """Warn if ``device`` has no instructions for the number format."""
    if first_on_node() and emulates(device, options.precision):
        reason = f"this CPU has no instructions for {options.precision} and emulates it"
        warn(f"{reason}, slower than --precision fp32 would be")


def check_one_shape(num_samples: int, global_batch_size: int, world_size: int) -> None:
    """Raise `UserError` unless all batches of a training epoch have the same size, as a CUDA graph needs it."""
    rest = num_samples % global_batch_size
    if rest >= world_size:  # fewer are left out
        raise UserError(
            f"--cuda_graph needs every batch of one shape: {num_samples} samples leave a last batch of {rest}; "
            f"use --limit_train {num_samples - rest}"
        )


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
                    f"--{name} {value} needs --dataset nbody, not {flags.dataset}; configs/unet3d.yaml says so, and "
                    "is given before the other unet3d_*.yaml"
                )
        return
    if flags.model != "unet3d":
        raise UserError("--dataset nbody holds volumes, and only --model unet3d maps volumes to volumes")
    if flags.crop_size % 2**flags.unet_depth:
        halvings = (flags.crop_size & -flags.crop_size).bit_length() - 1
        near = max(round(flags.crop_size / 2**flags.unet_depth), 1) * 2**flags.unet_depth
        raise UserError(
            f"--crop_size {flags.crop_size} cannot be halved {flags.unet_depth} times; take --crop_size {near}"
            + (f", or --unet_depth {halvings}" if halvings else "")
        )


def _check_precision(precision: str, device: torch.device) -> None:
    cuda = device.type == "cuda"
    ampere = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "tf32" and not ampere:
        raise UserError(f"--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; {_this_is(device)}")
    if precision == "bf16" and cuda and emulates(device, "bf16"):
        raise UserError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or newer; {_this_is(device)}: try --precision fp16"
            ", because PyTorch would only emulate bf16"
        )


def _check_cuda_graph(options: Options, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"--cuda_graph true needs an NVIDIA GPU; {_this_is(device)}")
    if options.compile not in ("off", "default"):
        raise UserError(
            f"--compile {options.compile} makes CUDA graphs of its own; with --cuda_graph, --compile default"
        )
    if options.loader == "dali":
        raise UserError(
            "--cuda_graph true cannot be combined with --loader dali: DALI's threads may wait for the whole GPU while "
            "the graph is captured, which CUDA forbids, and the two have not been tried together; use --loader device"
        )
    if options.optimizer == "sgd" and not options.fused:
        raise UserError(
            "--cuda_graph true with --optimizer sgd needs --fused true, to read the learning rate on the GPU"
        )
    if options.precision == "fp16" and not options.fused:
        raise UserError(
            "--cuda_graph true with --precision fp16 needs --fused true: any other optimizer asks the GPU in each step "
            "whether gradients overflowed, and a graph cannot wait for the answer"
        )


def _check_compiler(device: torch.device) -> None:
    """Compile something small, because a trial is better than any list of what torch.compile needs.

    It starts the processes that compile from now on. They inherit that stop signals, which reach them too, are blocked.
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


def _this_is(device: torch.device) -> str:
    return f"this is {torch.cuda.get_device_name(device) if device.type == 'cuda' else f'the {device.type.upper()}'}"
