"""How long an operation would take on a GPU, from its shapes.

The time of an operation is the larger one of its arithmetic and its memory traffic, with a share of the peak that such
operations attain, and at least some microseconds for each kernel. (A roofline: Williams, Waterman and Patterson 2009,
https://doi.org/10.1145/1498765.1498785.)
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from .interface import Settings

ATTAINED = {"matmul": 0.65, "conv": 0.35, "attention": 0.40, "memory": 0.62}
"""share of the peak, or of the memory's bandwidth, that large operations of a kind attain"""
SHORTEST = 2.5e-6
"""seconds of the shortest kernel"""
RAMP = 1e-5
"""seconds that an operation with arithmetic takes beside it: a small one does not fill a GPU (assumed, not fitted)"""
KINDS = {"mm": "matmul", "addmm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "_scaled_mm": "matmul"}


def kind_of(name: str) -> str:
    """Return the kind of an operation with a known number of FLOPs."""
    if "convolution" in name:
        return "conv"
    return "attention" if "attention" in name else KINDS.get(name, "matmul")


class Durations:
    """The durations of operations on one GPU."""

    def __init__(self, settings: Settings) -> None:
        self.peak, self.bandwidth = settings.peak, settings.bandwidth

    def of(self, func: Any, args: Any, kwargs: Any, out: Any, launches: int) -> float:
        """Return how many seconds an operation takes that makes so many launches."""
        name = name_of(func)
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        moved = sum(map(size_of, tensors)) + written_in_place(func, args)
        known = {id(t) for t in tensors}
        moved += sum(size_of(t) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and id(t) not in known)
        seconds = moved / (self.bandwidth * ATTAINED["memory"])
        if count := flop_registry.get(func._overloadpacket):
            flops, kind = count(*args, **kwargs, out_val=out), kind_of(name)
            dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
            peak = self.peak_of(dtype, kind)
            seconds = max(seconds, flops / (peak * ATTAINED[kind]) + RAMP if flops else 0)
        return max(seconds, launches * SHORTEST)

    def of_compiled(self, moved: float) -> float:
        """Return how many seconds a kernel of torch.compile takes that moves so many bytes."""
        return max(moved / (self.bandwidth * ATTAINED["memory"]), SHORTEST)

    def peak_of(self, dtype: torch.dtype, kind: str) -> float:
        """Return the FLOP/s of the units that compute this kind of operation."""
        if kind == "attention" and dtype == torch.float32:
            # Three products of TF32 for one of fp32, whatever the flags say (torch/include/ATen/native/transformers/
            # cuda/mem_eff_attention/gemm_kernel_utils.h, for compute capability 8.0 and newer).
            return max(self.peak["fp32"], self.peak["tf32"] / 3)
        return self.peak[format_of(dtype, kind)]


def name_of(func: Any) -> str:
    """Return the name of an operation."""
    return func._schema.name.partition("::")[2]


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on the GPU: of one that is expanded, those that it has in memory."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def written_in_place(func: Any, args: Any) -> int:
    """Return the bytes that an operation writes to its arguments, which it has read too."""
    total = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            total += sum(size_of(t) for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor))
    return total


def format_of(dtype: torch.dtype, kind: str) -> str:
    """Return the name of the format in which matrix units compute this type."""
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16" if dtype == torch.bfloat16 else "fp16"
    fast = torch.backends.cudnn.allow_tf32 if kind == "conv" else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if dtype == torch.float32 and fast else "fp32"
