"""Without values nothing needs to be drawn: large random tensors on the CPU stay as they are, and take no memory.

A model of 7 billion weights is otherwise drawn in minutes, on rank 0 of lesson 05 for example, and takes 26 GB.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import functools
from typing import Any

import torch

LARGE = 1 << 20
"""numbers in a tensor, above which it is not drawn"""
METHODS = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "bernoulli_", "geometric_")


def install() -> None:
    """Replace the methods of tensors that draw random numbers."""
    for name in METHODS:
        setattr(torch.Tensor, name, unless_large(getattr(torch.Tensor, name)))


def unless_large(draw: Any) -> Any:
    """Return a method that draws only small tensors."""

    @functools.wraps(draw)
    def drawn(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type == "cpu" and self.numel() > LARGE and not kwargs.get("generator"):
            return self
        return draw(self, *args, **kwargs)

    return drawn
