"""Moving averages in 16 bits: how much of them an update changes.

A step of an average with a decay of 0.999 is a thousandth of the difference, and the last digit of bfloat16 is 1 in 128
to 256: such steps are rounded away, and the average stays where it began.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..trail import note, user_line
from .common import address, patch, quietly

LOW = (torch.bfloat16, torch.float16)
MOST, CALLS = 4096, 200
"""elements of a tensor, and calls of a line, that are looked at"""
TORCH = os.path.dirname(torch.__file__)
AVERAGES = os.path.join(TORCH, "optim", "swa_utils.py")


@dataclass
class Line:
    """What the updates of averages in a line have changed."""

    dtype: str
    calls: int = 0
    apart: int = 0
    """elements in which the average and the value differed"""
    stayed: int = 0
    """how many of these the update has left unchanged"""


class Averages:
    """The averages of this process."""

    lines: ClassVar[dict[str, Line]] = {}
    scaled: ClassVar[tuple[int, float, torch.Tensor] | None] = None
    """the tensor that mul_ has scaled last: its memory, the factor, and what it held before"""


def install() -> None:
    """Observe `lerp_`, `_foreach_lerp_`, and `mul_` before `add_`."""
    patch(torch.Tensor, "lerp_", _lerp)
    patch(torch.Tensor, "mul_", _scaling)
    patch(torch.Tensor, "add_", _adding)
    patch(torch, "_foreach_lerp_", _foreach_lerp)


def finish() -> None:
    """Log what was seen of each line."""
    for at, line in Averages.lines.items():
        note("average", at=at, dtype=line.dtype, calls=line.calls, apart=line.apart, stayed=line.stayed)


def _is_low(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in LOW and tensor.is_cpu and not tensor.requires_grad


def _of_an_average() -> bool:
    """Return whether the script calls, or PyTorch's averages of weights; not an optimizer, which has averages, too."""
    file = sys._getframe(2).f_code.co_filename
    return file == AVERAGES or not file.startswith(TORCH)


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()[:MOST].clone()


def _lerp(own: Callable[..., Any]) -> Callable[..., Any]:
    def lerp_(self: torch.Tensor, end: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_is_low(self) and _of_an_average()):
            return own(self, end, *args, **kwargs)
        before = _first(self)
        result = own(self, end, *args, **kwargs)
        _compare(before, self, end)
        return result

    return lerp_


def _foreach_lerp(own: Callable[..., Any]) -> Callable[..., Any]:
    def foreach_lerp_(tensors: Iterable[torch.Tensor], ends: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        tensors, ends = list(tensors), list(ends)
        if not (tensors and all(map(_is_low, tensors)) and _of_an_average()):
            return own(tensors, ends, *args, **kwargs)
        before = [_first(tensor) for tensor in tensors]
        result = own(tensors, ends, *args, **kwargs)
        for was, tensor, end in zip(before, tensors, ends, strict=True):
            _compare(was, tensor, end)
        return result

    return foreach_lerp_


def _scaling(own: Callable[..., Any]) -> Callable[..., Any]:
    def mul_(self: torch.Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_low(self) and isinstance(other, float) and 0.9 <= other < 1 and _of_an_average():
            Averages.scaled = address(self), other, _first(self)
        return own(self, other, *args, **kwargs)

    return mul_


def _adding(own: Callable[..., Any]) -> Callable[..., Any]:
    def add_(self: torch.Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, other, *args, **kwargs)
        if Averages.scaled and _is_low(self):
            place, factor, before = Averages.scaled
            if place == address(self) and isinstance(other, torch.Tensor):
                value = other if "alpha" in kwargs else other / (1 - factor)
                _compare(before, self, value)
            Averages.scaled = None
        return result

    return add_


@quietly
def _compare(before: torch.Tensor, average: torch.Tensor, value: torch.Tensor) -> None:
    """Note how many elements stayed, of those in which the average differed from the value."""
    at = user_line()
    line = Averages.lines.setdefault(at, Line(str(average.dtype).removeprefix("torch.")))
    if line.calls < CALLS and value.shape == average.shape:
        apart = before != _first(value).to(before.dtype)
        line.calls += 1
        line.apart += int(apart.sum())
        line.stayed += int((apart & (before == _first(average))).sum())
