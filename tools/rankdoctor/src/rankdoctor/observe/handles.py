"""Open files, databases and sockets of a data set: opened by each worker, or before the workers are forked."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn
from torch.utils import data

from ..trail import note
from .common import patch, quietly
from .probe import Lines, watch_attributes

FETCHES = 2
"""batches of each worker that are looked at"""
MOST = 20
"""entries of a list that are looked into"""
UNSEEN = ("LMDB", "socket", "netCDF")
"""kinds of which it cannot be seen whether a worker uses them"""


class Opened:
    """What the process that starts workers has open in its data sets."""

    pid = 0
    handles: ClassVar[dict[str, int]] = {}
    """their ids, by their paths; a forked worker has a copy"""
    fetches: ClassVar[dict[int, int]] = {}


def install() -> None:
    """Look at data sets when workers are started, and after their first batches."""
    watch_attributes()
    patch(data.dataloader._MultiProcessingDataLoaderIter, "__init__", _starting)
    for fetcher in (data._utils.fetch._MapDatasetFetcher, data._utils.fetch._IterableDatasetFetcher):
        patch(fetcher, "fetch", _fetch)


def _starting(own: Callable[..., None]) -> Callable[..., None]:
    def init(iterator: Any, loader: data.DataLoader) -> None:
        remember(loader.dataset)
        own(iterator, loader)

    return init


@quietly
def remember(dataset: Any) -> None:
    """Remember the handles that are open before workers are started."""
    Opened.pid = os.getpid()
    Opened.handles |= {path: id(handle) for path, handle, _ in handles_of(dataset)}


def _fetch(own: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(fetcher: Any, indices: Any) -> Any:
        count = Opened.fetches.get(os.getpid(), 0)
        if Opened.pid in (0, os.getpid()) or count >= FETCHES:
            return own(fetcher, indices)
        Opened.fetches[os.getpid()] = count + 1
        before = positions(fetcher.dataset) or {}
        read: set[str] = set()
        with _watching(fetcher.dataset, read):
            batch = own(fetcher, indices)
        note_handles(fetcher.dataset, before, read)
        return batch

    return fetch


@contextlib.contextmanager
def _watching(dataset: Any, read: set[str]) -> Iterator[None]:
    """Note in ``read`` kinds of handles that are used meanwhile, where the position of the file does not tell."""
    connections = [handle for _, handle, kind in handles_of(dataset) if kind == "SQLite"]
    for one in connections:
        one.set_trace_callback(lambda _: read.add("SQLite"))
    h5py = sys.modules.get("h5py")
    own_read = h5py.Dataset.__getitem__ if h5py else None

    def get(of: Any, *args: Any, **kwargs: Any) -> Any:
        read.add("HDF5")
        return own_read(of, *args, **kwargs)  # type: ignore[misc]

    try:
        if h5py:
            h5py.Dataset.__getitem__ = get
        yield
    finally:
        if h5py:
            h5py.Dataset.__getitem__ = own_read
        for one in connections:
            with contextlib.suppress(Exception):  # closed by now
                one.set_trace_callback(None)


@quietly
def positions(dataset: Any) -> dict[str, int]:
    """Return where the open files of a data set stand."""
    return {path: place for path, handle, _ in handles_of(dataset) if (place := _position(handle)) is not None}


@quietly
def note_handles(dataset: Any, before: dict[str, int], read: set[str]) -> None:
    """Log the open handles of a data set in a worker, and which of them its parent had opened and it has used."""
    found = []
    for path, handle, kind in handles_of(dataset):
        inherited = Opened.handles.get(path) == id(handle)
        moved = path in before and _position(handle) != before[path]
        found.append((path, kind, inherited, kind in UNSEEN or kind in read or moved))
    locked = any(type(value).__module__ == "multiprocessing.synchronize" for value in vars(dataset).values())
    lines = Lines.known.get(id(dataset), {})
    at = {path: lines[name] for path, *_ in found if (name := path.lstrip(".").split(".")[0].split("[")[0]) in lines}
    note("handles", dataset=type(dataset).__name__, handles=found, locked=locked, lines=at)


def _position(handle: Any) -> int | None:
    """Return where the file of a handle stands, which a process shares with those it has forked."""
    files: list[Any] = [handle, getattr(handle, "fp", None), getattr(handle, "fileobj", None)]
    for file in files:
        try:
            return os.lseek(file.fileno(), 0, os.SEEK_CUR)
        except (AttributeError, OSError, ValueError):
            continue
    return None


def handles_of(dataset: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield path, object and kind of each open handle that a data set has, or uses as a global of its module."""
    seen: set[int] = set()
    yield from _inside(dataset, "", 4, seen)
    for name in ("__getitem__", "__iter__", "__getitems__"):
        function = getattr(type(dataset), name, None)
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        for used in code.co_names if code else ():
            if used in names and (kind := kind_of(names[used])):
                yield f"{used} (global)", names[used], kind


def _inside(thing: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any, str]]:
    if id(thing) in seen or isinstance(thing, nn.Module | str | bytes | int | float | type):
        return
    seen.add(id(thing))
    if kind := kind_of(thing):
        yield path, thing, kind
    elif depth and isinstance(thing, dict):
        for key, value in list(thing.items())[:MOST]:
            yield from _inside(value, f"{path}[{key!r}]", depth - 1, seen)
    elif depth and isinstance(thing, list | tuple):
        for number, value in enumerate(thing[:MOST]):
            yield from _inside(value, f"{path}[{number}]", depth - 1, seen)
    elif depth and hasattr(thing, "__dict__"):
        for name, value in list(vars(thing).items()):
            yield from _inside(value, f"{path}.{name}", depth - 1, seen)


def kind_of(thing: Any) -> str:
    """Return what kind of open handle this is; "" if it is none, or closed."""
    module, name = type(thing).__module__.partition(".")[0], type(thing).__name__
    try:
        if module == "h5py":
            return "HDF5" if name in ("File", "Group", "Dataset") and thing else ""
        if module == "netCDF4":
            return "netCDF" if name == "Dataset" and thing.isopen() else ""
        if module == "lmdb" or name == "Environment":
            return "LMDB" if "lmdb" in sys.modules else ""
        if module == "sqlite3" and name == "Connection":
            return "SQLite" if thing.total_changes >= 0 else ""
        if isinstance(thing, io.IOBase) or (hasattr(thing, "recv") and hasattr(thing, "fileno")):
            return ("socket" if hasattr(thing, "recv") else "file") if thing.fileno() >= 0 else ""
        if name in ("ZipFile", "TarFile"):
            return f"{name[:3].lower()} archive" if _position(thing) is not None else ""
    except Exception:  # such as a closed connection
        return ""
    return ""
