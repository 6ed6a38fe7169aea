"""Pairs of a center and a scale, such as mean and std, that the script holds while it trains: the same on all ranks?"""
# ruff: noqa: ANN401  (it passes on values of any kind)

import math
import re
import sys
from typing import Any, ClassVar

import torch
from torch import nn

from ..trail import note
from .common import local, quietly
from .mappings import held, line_of

CENTERS = re.compile(r"(?<![a-z])(means?|mu|centers?|loc|avg|average|mins?|minimum|offset)(?![a-z])")
SCALES = re.compile(r"(?<![a-z])(stds?|sigma|sd|scales?|var|variance|max|maximum|range|stddev)(?![a-z])")
LARGEST = 4096
MOST_OBJECTS = 2000
LATER = 3
"""updates after which a pair must be as it was: that of a batch, or a running one, is another one then"""


class Pairs:
    """The pairs of this process at the first update."""

    first: ClassVar[dict[tuple[str, str], list[list[float]]]] = {}


@quietly
def look(step: int) -> None:
    """Remember the pairs before the first update, and log those that are the same some updates later."""
    if step not in (0, LATER):
        return
    pairs = found(sys._getframe(1))
    if step == 0:
        Pairs.first = pairs
        return
    for (center, scale), values in pairs.items():
        if Pairs.first.get((center, scale)) == values:
            note("statistics", name=f"{center} and {scale}", at=line_of(center), pair=values)


def found(frame: Any) -> dict[tuple[str, str], list[list[float]]]:
    """Return for each pair, by its two names, the sum of each, and the sum of its sizes."""
    centers: dict[str, tuple[str, list[float]]] = {}
    scales: dict[str, tuple[str, list[float]]] = {}
    for count, (name, value) in enumerate(held(frame, is_holder)):
        if count > MOST_OBJECTS:
            break
        parent, dot, last = name.rpartition(".")
        for pattern, known in ((CENTERS, centers), (SCALES, scales)):
            key, replaced = pattern.subn("*", last.lower())
            if replaced == 1 and (sums := sums_of(value)):
                known[f"{parent}{dot}{key}"] = name, sums
    both = sorted(centers.keys() & scales.keys())
    return {(centers[key][0], scales[key][0]): [centers[key][1], scales[key][1]] for key in both}


def is_holder(value: Any) -> bool:
    """Return whether an object may hold statistics: no module, whose buffers DDP broadcasts, and no function."""
    return not isinstance(value, nn.Module | type) and not hasattr(value, "__code__")


def sums_of(value: Any) -> list[float]:
    """Return the sum of a value's numbers, and of their sizes; nothing if it is no small tensor or array of floats."""
    if isinstance(value, float):
        return [value, abs(value)] if math.isfinite(value) else []
    if isinstance(value, torch.Tensor):
        tensor = local(value)
    elif type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") == "f":
        tensor = torch.as_tensor(value)
    else:
        return []
    if not tensor.is_floating_point() or not 0 < tensor.numel() <= LARGEST or tensor.requires_grad:
        return []
    total = tensor.detach().double()
    sums = [float(total.sum()), float(total.abs().sum())]
    return sums if all(map(math.isfinite, sums)) else []
