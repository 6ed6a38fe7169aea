"""Names for the parts of a training step, which profilers show as ranges on their time lines.

The lessons name ``data`` (waiting for the next batch), ``forward``, ``backward`` and ``optimizer``. In an ordinary run
`annotate` hands out a context manager that does nothing. ``--trace true`` makes ranges of ``torch.profiler`` of the
names, Nsight Systems NVTX ranges.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")
Marker = Callable[[str], AbstractContextManager]


def under_nsys() -> bool:
    """Return whether Nsight Systems watches this process; it tells the programs it starts by this variable."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


_NOTHING = nullcontext()
# A torch without CUDA has no NVTX.
_marker: Marker | None = torch.cuda.nvtx.range if under_nsys() and torch.version.cuda else None


def annotate(name: str) -> AbstractContextManager:
    """Return a context manager; what runs inside it is the range ``name`` of whichever profiler is looking."""
    return _NOTHING if _marker is None else _marker(name)


def annotated(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over ``items``; each wait for the next one, the one that finds there are no more too, is a range."""
    iterator = iter(items)
    while True:
        with annotate(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@contextmanager
def marked_by(marker: Marker) -> Iterator[None]:
    """Make `annotate` mark its ranges with ``marker``, for as long as this context lasts."""
    global _marker
    before, _marker = _marker, marker
    try:
        yield
    finally:
        _marker = before
