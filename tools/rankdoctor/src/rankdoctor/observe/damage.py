"""Damage on one rank, in separate runs: a NaN, or a loss that is far too large and a worse validation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..trail import trail
from .common import CONFIG
from .models import models

FAR = 30.0
"""how far outputs are moved: the loss is then far above a threshold of a few times the usual loss"""


def is_time_for_nan() -> bool:
    """Return whether this call is the one whose inputs are to be damaged: one in the third update, on one rank."""
    if CONFIG.nan_rank < 0 or trail.step != 2 or models.damaged or not dist.is_initialized():
        return False
    models.damaged = dist.get_rank() == CONFIG.nan_rank
    return models.damaged


def is_outlier(module: nn.Module, training: bool) -> bool:
    """Return whether the outputs of this call are to be far off, on one rank.

    In training those of one update, in evaluation all after the update in which a model was evaluated first.
    """
    if CONFIG.outlier_rank < 0 or not dist.is_initialized() or dist.get_rank() != CONFIG.outlier_rank:
        return False
    if training:
        return trail.step == CONFIG.outlier_step
    if module.training or torch.is_grad_enabled():
        return False
    if models.evaluated < 0:
        models.evaluated = trail.step
    return trail.step > models.evaluated


def with_nan(value: torch.Tensor) -> torch.Tensor:
    """Return an input in which the first sample is not a number."""
    if not value.dim() or not len(value):
        return value
    value = value.clone()
    value[0] = float("nan")
    return value


def far_off(value: torch.Tensor) -> torch.Tensor:
    """Return outputs with which a loss is far too large; probabilities stay probabilities."""
    if not value.numel():
        return value
    plain = value.detach().float()
    if not value.dim() or plain.max() <= 0:  # a loss, or logarithms of probabilities
        return value * FAR
    if plain.min() >= 0 and plain.max() <= 1:
        return 1 - value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device, value.dtype)
    return value + FAR * max(1.0, float(plain.abs().mean())) * noise


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    """Return inputs or outputs of a model with their floating-point tensors changed; dictionaries are changed in place.

    Other objects, and tensors of other classes, such as sharded ones, are returned as they are.
    """
    if type(value) is torch.Tensor:
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        for key in value:
            value[key] = changed(value[key], change)
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(one, change) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(one, change) for one in value)
    return value


def has_numbers(value: Any) -> bool:  # noqa: ANN401
    """Return whether there is a floating-point tensor among the positional inputs of a model."""
    return any(type(one) is torch.Tensor and one.is_floating_point() and one.dim() > 0 for one in value)
