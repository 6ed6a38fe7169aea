"""How a training step is computed: number formats, memory layout, compiled code, CUDA graphs.

What the device at hand lacks is refused in one line. On TF32 and its switches see
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from dataclasses import dataclass
from typing import Literal

import torch

from workshop.errors import UserError
from workshop.volumes import VolumeConfig

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""the 16-bit formats: torch.autocast uses them where that is safe"""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(VolumeConfig):
    """The flags of how a training step is computed."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: round what matrix products read; bf16, fp16: compute in half as many bits where autocast says it is safe"""
    channels_last: bool = False
    """keep the channels of a pixel side by side in memory, as fast convolutions want them"""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """have torch.compile fuse operations into fewer kernels; the modes after default take longer to do it"""
    cuda_graph: bool = False
    """on an NVIDIA GPU: record one training step, then launch all its kernels at once"""
    cudnn_benchmark: bool = False
    """on an NVIDIA GPU: let cuDNN try its algorithms for each shape of convolution and keep the fastest"""


def set_up_device(config: ComputeConfig, device: torch.device) -> None:
    """Tell torch how ``device`` shall compute.

    Raises:
        UserError: the device lacks an option, or two options do not go together.
    """
    require_options(config, device)
    set_switches(config)


def require_options(config: ComputeConfig, device: torch.device) -> None:
    """See that ``device`` has all options chosen.

    Raises:
        UserError: as `set_up_device`.
    """
    _require_precision(config, device)
    if config.cudnn_benchmark and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {_this_is(device)}")
    if config.cuda_graph:
        _require_cuda_graph(config, device)
    if config.compile != "off":
        _require_compiler(device)


def set_switches(config: ComputeConfig) -> None:
    """Set what torch keeps one switch of for the whole process: TF32, and cuDNN's search for algorithms."""
    # Left alone, PyTorch rounds to TF32 on NVIDIA GPUs in convolutions, but not in matrix products.
    for operations in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        operations.fp32_precision = "tf32" if config.precision == "tf32" else "ieee"
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def choose_memory_format(config: ComputeConfig) -> torch.memory_format:
    """Return how the model's weights lie in memory; what convolutions make of a batch then lies likewise."""
    if not config.channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if config.dataset == "nbody" else torch.channels_last


def _require_precision(config: ComputeConfig, device: torch.device) -> None:
    cuda = device.type == "cuda"
    ampere = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if config.precision == "tf32" and not ampere:
        raise UserError(f"--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; {_this_is(device)}")
    if config.precision == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or newer; {_this_is(device)}: try --precision fp16"
        )


def _require_cuda_graph(config: ComputeConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"--cuda_graph true needs an NVIDIA GPU; {_this_is(device)}")
    if config.compile not in ("off", "default"):
        raise UserError(
            f"--compile {config.compile} makes CUDA graphs of its own; with --cuda_graph, --compile default"
        )
    if config.precision == "fp16" and not config.fused:
        raise UserError(
            "--cuda_graph true with --precision fp16 needs --fused true: any other optimizer asks the GPU in each step "
            "whether gradients overflowed, and a graph cannot wait for the answer"
        )
    if config.optimizer == "sgd" and not config.fused:
        raise UserError("--cuda_graph true with --optimizer sgd needs --fused true, which reads the rate on the GPU")


def _require_compiler(device: torch.device) -> None:
    """Compile something small: no list of what torch.compile needs is as good as a trial."""
    try:
        torch.compile(torch.square)(torch.ones(2, device=device))
    except Exception as error:  # torch raises many kinds, some of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--compile: torch.compile does not work here: {reason}; it needs a C++ compiler such as g++, and on a GPU "
            "also Triton: install them, or use --compile off"
        ) from None


def _this_is(device: torch.device) -> str:
    return f"this is {torch.cuda.get_device_name(device) if device.type == 'cuda' else f'the {device.type.upper()}'}"
