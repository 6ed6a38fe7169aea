"""How a training step is computed: number formats, memory layout, compiled code, CUDA graphs.

What the device at hand lacks is refused in one line. On TF32 and its switches see
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

import signal

import torch

from workshop.config import ComputeFlags
from workshop.errors import UserError, first_on_node, warn
from workshop.hardware import only_imitates
from workshop.signals import STOP_SIGNALS

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""what ``--precision`` makes torch.autocast compute in where that is safe; with fp32 and tf32 it stays switched off"""


def set_up_device(config: ComputeFlags, device: torch.device) -> None:
    """Tell torch how ``device`` shall compute; raise as `require_options`."""
    require_options(config, device)
    set_switches(config)
    if first_on_node() and only_imitates(device, config.precision):
        imitates = f"this CPU has no instructions for {config.precision} and imitates it"
        warn(f"{imitates}, slower than --precision fp32 would be")


def require_options(config: ComputeFlags, device: torch.device) -> None:
    """Raise `UserError` unless ``device`` has all options chosen, and they go together."""
    _require_precision(config, device)
    if config.cudnn_benchmark and device.type != "cuda":
        raise UserError(f"--cudnn_benchmark true needs an NVIDIA GPU; {_this_is(device)}")
    if config.cuda_graph:
        _require_cuda_graph(config, device)
    if config.compile != "off":
        _require_compiler(device)


def set_switches(config: ComputeFlags) -> None:
    """Set what torch keeps one switch of for the whole process: TF32, and cuDNN's search for algorithms."""
    # By default, PyTorch rounds to TF32 on NVIDIA GPUs in convolutions, but not in matrix products.
    set_tf32(convolutions=config.precision == "tf32", matrix_products=config.precision == "tf32")
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def set_tf32(*, convolutions: bool, matrix_products: bool) -> None:
    """Set whether float32 convolutions and matrix products are rounded to TF32 on NVIDIA GPUs."""
    # PyTorch has two sets of switches for this. After the newer ones (fp32_precision) are set, reading the older ones
    # raises an error. Parts of PyTorch still read them: `torch.backends.cudnn.flags()`, and up to PyTorch 2.12 the
    # compiler in its mode max-autotune. The older ones keep both sets readable.
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision("high" if matrix_products else "highest")


def choose_memory_format(channels_last: bool, volumes: bool) -> torch.memory_format:
    """Return how the weights of a model for images or volumes lie in memory; what it makes of a batch lies likewise."""
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if volumes else torch.channels_last


def _require_precision(config: ComputeFlags, device: torch.device) -> None:
    cuda = device.type == "cuda"
    ampere = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if config.precision == "tf32" and not ampere:
        raise UserError(f"--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; {_this_is(device)}")
    if config.precision == "bf16" and cuda and only_imitates(device, "bf16"):
        raise UserError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or newer; {_this_is(device)}: try --precision fp16"
            ", as PyTorch would only imitate bf16"
        )


def _require_cuda_graph(config: ComputeFlags, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"--cuda_graph true needs an NVIDIA GPU; {_this_is(device)}")
    if config.compile not in ("off", "default"):
        raise UserError(
            f"--compile {config.compile} makes CUDA graphs of its own; with --cuda_graph, --compile default"
        )
    if getattr(config, "loader", "") == "dali":  # a lesson's configuration also has the flags of the data
        raise UserError(
            "--cuda_graph true does not go with --loader dali: DALI's threads may wait for the whole GPU while the "
            "graph is captured, which CUDA forbids, and the two have not been tried together; use --loader device"
        )
    if config.precision == "fp16" and not config.fused:
        raise UserError(
            "--cuda_graph true with --precision fp16 needs --fused true: any other optimizer asks the GPU in each step "
            "whether gradients overflowed, and a graph cannot wait for the answer"
        )


def _require_compiler(device: torch.device) -> None:
    """Compile something small: no list of what torch.compile needs is as good as a trial.

    It starts the processes that compile from now on: they inherit that stop signals, which reach them too, wait.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        torch.compile(torch.square)(torch.ones(2, device=device))
    except Exception as error:  # torch raises many kinds, some of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--compile: torch.compile does not work here: {reason}; it needs a C++ compiler such as g++, and on a GPU "
            "also Triton: install them, or use --compile off"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _this_is(device: torch.device) -> str:
    return f"this is {torch.cuda.get_device_name(device) if device.type == 'cuda' else f'the {device.type.upper()}'}"
