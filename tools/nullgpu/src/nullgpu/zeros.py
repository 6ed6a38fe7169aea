"""Adapt a process without --values: skip large random tensors, and compute what ranks exchange as Python objects.

Large random tensors on the CPU are left uninitialized, so they take no memory. Otherwise the initialization of a model
of 7 billion weights, for example on rank 0 of lesson 05, takes minutes and 26 GB. Python objects that ranks exchange
need values, because PyTorch computes their sizes on the GPU; so do optimizers, which check a learning rate on the GPU.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .values import Values

OBJECTS = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
LARGE = 1 << 20
"""number of elements above which a random tensor is not initialized"""
METHODS = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "bernoulli_", "geometric_")


def install() -> None:
    """Replace the methods of tensors that draw random numbers."""
    for name in OBJECTS:
        if own := getattr(c10d, name, None):
            setattr(c10d, name, with_values(own))
            setattr(dist, name, getattr(c10d, name))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and "__init__" in vars(kind):
            setattr(kind, "__init__", with_values(vars(kind)["__init__"]))  # noqa: B010  (no name of an attribute to mypy)
    for name in METHODS:
        setattr(torch.Tensor, name, unless_large(getattr(torch.Tensor, name)))


def with_values(function: Any) -> Any:
    """Return a function that computes on the CPU what it needs."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with Values():
            return function(*args, **kwargs)

    return computed


def unless_large(draw: Any) -> Any:
    """Return a method that draws random numbers for small tensors only."""

    @functools.wraps(draw)
    def drawn(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type == "cpu" and self.numel() > LARGE and not kwargs.get("generator"):
            return self
        return draw(self, *args, **kwargs)

    return drawn
