"""What the device at hand and the options of lesson 04 do not allow is refused here, in one line."""

from typing import Protocol

import torch

from workshop.checks import check_compiler, check_precision, this_is
from workshop.errors import UserError


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
    check_precision(options.precision, device)
    if options.cudnn_benchmark and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {this_is(device)}")
    if options.cuda_graph:
        _check_cuda_graph(options, device)
    if options.compile != "off":
        check_compiler(device)


def check_one_shape(num_samples: int, global_batch_size: int, world_size: int) -> None:
    """Raise `UserError` unless all batches of a training epoch have the same size, as a CUDA graph needs it."""
    rest = num_samples % global_batch_size
    if rest >= world_size:  # fewer are left out
        raise UserError(
            f"--cuda_graph needs every batch of one shape: {num_samples} samples leave a last batch of {rest}; "
            f"use --limit_train {num_samples - rest}"
        )


def _check_cuda_graph(options: Options, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"--cuda_graph true needs an NVIDIA GPU; {this_is(device)}")
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
