"""Norms of CUDA, computed on the CPU: cuDNN's batch norm, SyncBatchNorm, and norms whose statistics are float32.

As in kernels.py, each function has the signature of its operation in PyTorch's native_functions.yaml.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple:
    """aten::cudnn_batch_norm"""
    return *torch.native_batch_norm(x, weight, bias, mean, variance, training, momentum, epsilon), None


def cudnn_batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    batch_mean: Tensor,
    inverse_deviation: Tensor,
    epsilon: float,
    reserve: Tensor,
) -> tuple:
    """aten::cudnn_batch_norm_backward"""
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, variance, batch_mean, inverse_deviation, True, epsilon, [True, True, True]
    )


def in_32_bits(args: Any) -> list[Any]:
    """Return the arguments with 16-bit tensors in float32."""
    return [a.float() if isinstance(a, Tensor) and a.dtype in (torch.bfloat16, torch.float16) else a for a in args]


def in_float32(name: str) -> Callable[..., Any]:
    """Return an operation that computes in float32: on CUDA, its statistics are float32 where the CPU's are 16-bit."""
    operation = getattr(torch.ops.aten, name).default
    return lambda *args, **kwargs: operation(*in_32_bits(args), **kwargs)


def per_channel(x: Tensor, values: Tensor) -> Tensor:
    """Return values (C,) in a shape that spreads over x (N, C, ...)."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def over_samples(x: Tensor) -> Tensor:
    """Return the sums (C,) of x (N, C, ...)."""
    return x.sum([axis for axis in range(x.dim()) if axis != 1])


def sync_stats(x: Tensor, epsilon: float) -> tuple:
    """aten::batch_norm_stats, of SyncBatchNorm: mean and 1 / deviation of this rank."""
    count = x.numel() / x.shape[1]
    mean = over_samples(x.float()) / count
    variance = over_samples((x.float() - per_channel(x, mean)) ** 2) / count
    return mean, (variance + epsilon).rsqrt()


def sync_gather(
    x: Tensor,
    means: Tensor,
    inverse: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    epsilon: float,
    counts: Tensor,
) -> tuple:
    """aten::batch_norm_gather_stats_with_counts: mean and 1 / deviation over all ranks."""
    share = (counts / counts.sum()).reshape(-1, 1)
    mean = (share * means).sum(0)
    variance = (share * (inverse**-2 - epsilon + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        total = counts.sum()
        running_variance.lerp_((variance * total / (total - 1)).to(running_variance.dtype), momentum)
    return mean, (variance + epsilon).rsqrt()


def sync_normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, epsilon: float
) -> Tensor:
    """aten::batch_norm_elemt"""
    out = (x.float() - per_channel(x, mean)) * per_channel(x, inverse)
    out = out if weight is None else out * per_channel(x, weight.float())
    return (out if bias is None else out + per_channel(x, bias.float())).to(x.dtype)


def sync_backward_sums(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple:
    """aten::batch_norm_backward_reduce: sums of this rank, and the gradients of weight and bias."""
    sums = over_samples(grad.float())
    with_x = over_samples(grad.float() * (x.float() - per_channel(x, mean)))
    kind = sums.dtype if weight is None else weight.dtype
    of_weight, of_bias = (with_x * inverse).to(kind), sums.to(kind)
    return sums, with_x, of_weight if needs_weight else None, of_bias if needs_bias else None


def sync_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    with_x: Tensor,
    counts: Tensor,
) -> Tensor:
    """aten::batch_norm_backward_elemt: the gradient of x, from the sums over all ranks."""
    total = counts.sum()
    factor = inverse if weight is None else inverse * weight.float()
    along = (x.float() - per_channel(x, mean)) * per_channel(x, inverse**2 * with_x / total)
    return ((grad.float() - per_channel(x, sums / total) - along) * per_channel(x, factor)).to(x.dtype)


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::cudnn_batch_norm": cudnn_batch_norm,
    "aten::cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "aten::native_layer_norm_backward": in_float32("native_layer_norm_backward"),
    "aten::native_group_norm_backward": in_float32("native_group_norm_backward"),
    "aten::native_batch_norm_backward": in_float32("native_batch_norm_backward"),
    "aten::batch_norm_stats": sync_stats,
    "aten::batch_norm_gather_stats_with_counts": sync_gather,
    "aten::batch_norm_elemt": sync_normalize,
    "aten::batch_norm_backward_reduce": sync_backward_sums,
    "aten::batch_norm_backward_elemt": sync_backward,
}
