"""Data sets: which sample a number means, below subsets and wrappers, and what can be compared between ranks."""
# ruff: noqa: ANN401  (data sets of any kind)

import contextlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import data

from ..trail import note
from .common import CONFIG, fingerprint, fingerprints

MANY_OBJECTS = 20_000


@dataclass
class Known:
    """The loaders and data sets that were seen in this process. They are kept, so that ids stay unique."""

    loaders: dict[int, tuple[str, data.DataLoader]] = field(default_factory=dict)
    datasets: dict[int, tuple[int, Any]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    forms: dict[int, tuple[tuple, int]] = field(default_factory=dict)
    """of data sets that are read by tuples, by their ids: such a tuple, and which part is the number of the sample"""
    drained: set[str] = field(default_factory=set)
    """loaders of streams of which the batches were counted"""
    mixed: set[int] = field(default_factory=set)
    """those of which several parts vary, such as a number and a seed: a number alone is no sample"""
    begins: dict[str, list[list[tuple[list[int], dict[str, int]]]]] = field(default_factory=dict)
    """of each stream and pass: what the first batches hold, and the epochs of the data set then"""
    plain: dict[int, dict[tuple[int, str], Any]] = field(default_factory=dict)
    """of loaders whose workers stay, by their ids: the single values in the data set when the workers began"""
    moved: dict[int, tuple[str, dict[tuple[int, str], tuple[Any, Any]]]] = field(default_factory=dict)
    """of such data sets, by their ids: the loader, and the values that were set later, before and now"""
    given: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """of each loader of a stream: hashes of the samples of its first pass, as they are and in any order"""
    files: int = 0


known = Known()


def samples_of(batch: Any) -> Iterator[Any]:
    """Yield what a sampler gives for each sample of a batch: a number, or a tuple with one."""
    for item in batch if not isinstance(batch, torch.Tensor) else batch.tolist():
        if isinstance(item, list):
            yield from item
        elif isinstance(item, torch.Tensor) and item.dim():
            yield from item.tolist()
        else:
            yield item


def varying(samples: list[tuple]) -> int:
    """Return which part of these tuples varies most."""
    columns = list(zip(*samples, strict=True))
    return max(range(len(columns)), key=lambda number: len(set(columns[number])))


def as_integers(samples: list) -> list[int]:
    """Return the numbers of samples; if they are tuples such as (epoch, number), the part that varies most."""
    if samples and isinstance(samples[0], tuple):
        part = varying(samples)
        samples = [sample[part] for sample in samples]
    try:
        return [int(sample) for sample in samples]
    except (TypeError, ValueError):
        return [zlib.crc32(repr(sample).encode()) for sample in samples]


def inner_of(dataset: Any) -> data.Dataset | None:
    """Return the data set that this one takes its samples from; None if there is none, or several."""
    if isinstance(named := getattr(dataset, "dataset", None), data.Dataset):
        return named
    found = [value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, data.Dataset)]
    return found[0] if len(found) == 1 else None


def below_subsets(dataset: Any) -> tuple[Any, Any, list[int] | None]:
    """Return the data set, the one below all subsets, and the numbers there of its samples (None: the same).

    A data set that contains another one of the same size is taken for a wrapper that changes samples, but not numbers.
    """
    base, indices = dataset, None
    while (inner := inner_of(base)) is not None:
        if isinstance(getattr(base, "indices", None), Iterable):
            below = [int(index) for index in base.indices]
            indices = below if indices is None else [below[index] for index in indices]
        elif isinstance(inner, data.IterableDataset) or not hasattr(inner, "__len__") or len(inner) != len(base):
            break
        base = inner
    return dataset, base, indices


def number_of(dataset: Any) -> int:
    """Return the number of a data set in this process; log it when it is seen first."""
    if id(dataset) not in known.datasets:
        number = len(known.datasets)
        known.datasets[id(dataset)] = number, dataset
        _, _, indices = below_subsets(dataset)
        objects = [
            (len(value), name)
            for name, value in getattr(dataset, "__dict__", {}).items()
            if isinstance(value, list | dict) and len(value) > MANY_OBJECTS
        ]
        note(
            "dataset",
            dataset=number,
            size=len(dataset),
            cls=type(dataset).__name__,
            file=None if indices is None else store(indices[: len(dataset)]),
            objects=max(objects, default=None),
            plain=_is_plain(dataset),
            content=content_of(dataset, len(dataset)),
        )
    return known.datasets[id(dataset)][0]


def _is_plain(dataset: Any, depth: int = 2) -> bool:
    """Return whether a data set holds tensors, arrays and single values only, so that no object is in its memory."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, data.Dataset) and depth:
            if not _is_plain(value, depth - 1):
                return False
        elif isinstance(value, list | tuple | dict | set):
            if len(value) > 1000:
                return False
        elif not (
            isinstance(value, torch.Tensor | str | int | float | type(None))
            or callable(value)
            or type(value).__name__ == "ndarray"
        ):
            return False
    return True


def content_of(dataset: Any, size: int) -> int:
    """Return a hash that differs between data sets in which sample k is not the same sample.

    It is made from the lists, arrays and tensors in the data set that have one entry for each sample; more entries if
    the data set was made shorter here (--uneven).
    """
    total, step = 0, 1 + size // 200

    def fits(entries: int) -> bool:
        return entries == size or (bool(CONFIG.uneven) and entries > size)

    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, torch.Tensor) and each.dim() and fits(len(each)):
                total = zlib.crc32(str(fingerprints(each[:size:step])).encode(), total)
            elif type(each).__name__ == "ndarray" and each.dtype != object and each.ndim and fits(len(each)):
                total = zlib.crc32(each[:size:step].tobytes(), total)
            elif isinstance(each, list) and fits(len(each)) and all(isinstance(one, torch.Tensor) for one in each[:1]):
                known = [fingerprint(one) for one in each[:size:step] if isinstance(one, torch.Tensor)]
                total = zlib.crc32(str(known).encode(), total)
            elif isinstance(each, list) and fits(len(each)):
                with contextlib.suppress(TypeError, ValueError):  # a list of objects
                    total = zlib.crc32(json.dumps(each[:size:step]).encode(), total)
    return total


def store(numbers: list[int]) -> str:
    """Write numbers of samples to a file of their own, and return its name."""
    known.files += 1
    name = f"{os.getpid()}_{known.files}.samples"
    with open(f"{CONFIG.logs}/{name}", "wb") as file:
        array("q", numbers).tofile(file)
    return name


def plain_values(dataset: Any) -> dict[tuple[int, str], Any]:
    """Return the numbers and texts in a data set and in those that it takes its samples from: by depth and name."""
    found: dict[tuple[int, str], Any] = {}
    depth = 0
    while dataset is not None:
        for name, value in getattr(dataset, "__dict__", {}).items():
            if type(value) in (bool, int, float, str):
                found[depth, name] = value
        dataset, depth = inner_of(dataset), depth + 1
    return found
