"""At the end: what some samples of each data set hold, by their numbers, so that the ranks can be compared."""
# ruff: noqa: ANN401  (it passes on values of any kind)

import random
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils import data

from ..trail import note, trail, user_line
from .common import fingerprints, state
from .datasets import below_subsets, inner_of, known

MOST_SAMPLES = 512
MOST_COLLATED = 32
"""samples that are given to a collate_fn of the script, one by one"""
SECONDS = 1.5
"""for all data sets of a process"""
COMPARED = 16
"""samples of which two copies of a data set are compared"""
LONGEST = 10_000
"""entries of an attribute that is compared"""
NUMBERS = (int, float, bool)
SEED = 1


class Lines:
    """The lines that set the attributes of data sets first, or after None, by the id of the data set."""

    known: ClassVar[dict[int, dict[str, str]]] = {}


def watch_attributes() -> None:
    """Remember the line of the script that sets each attribute of a data set."""

    def set_attribute(dataset: Any, name: str, value: Any) -> None:
        was_none = getattr(dataset, name, None) is None
        super(data.Dataset, dataset).__setattr__(name, value)
        lines = Lines.known.setdefault(id(dataset), {})
        if (name not in lines or was_none) and len(lines) < 64:
            lines[name] = user_line()

    data.Dataset.__setattr__ = set_attribute


def look_at_samples() -> None:
    """Log what some samples hold. It runs after the training, because reading a sample may have side effects."""
    if state.world < 2 or state.observing:
        return
    state.observing = True
    Clock.ends = time.perf_counter() + SECONDS
    old = signal.signal(signal.SIGALRM, _too_slow) if _is_main_thread() else None
    Clock.has_alarm = old is not None
    try:
        for number, dataset in list(known.datasets.values()):
            if (
                hasattr(dataset, "__len__")
                and not isinstance(dataset, data.IterableDataset)
                and not isinstance(dataset, data.Subset)
            ):
                _look_at(number, dataset)
        for number, dataset in list(known.datasets.values()):
            if id(dataset) in known.moved:
                _compare_copies(number, dataset)
        for _, loader in list(known.loaders.values()):
            function = loader.collate_fn  # or an object of a class with a method __call__
            code = getattr(function, "__code__", None) or getattr(
                vars(type(function)).get("__call__"), "__code__", None
            )
            numbers = [number for number, dataset in known.datasets.values() if dataset is loader.dataset]
            if trail.kind_of(getattr(code, "co_filename", "<")) and numbers and type(loader.dataset) is not data.Subset:
                _look_at(numbers[0], loader.dataset, loader.collate_fn)
    except Exception:
        note("doctor_failed", text=traceback.format_exc(limit=-3))
    finally:
        state.observing = False
        if old is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)


class Clock:
    """How long samples may be looked at."""

    ends = 0.0
    has_alarm = False


def _is_main_thread() -> bool:
    try:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    except (ValueError, TypeError):
        return False
    return True


def _too_slow(*_: object) -> None:
    raise TimeoutError


def _look_at(number: int, dataset: Any, collate: Callable[[list], Any] | None = None) -> None:
    if id(dataset) in known.mixed:
        return
    _, _, indices = below_subsets(dataset)
    numbers = list(range(len(dataset))) if indices is None else [int(n) for n in indices[: len(dataset)]]
    order = sorted(range(len(numbers)), key=lambda k: zlib.crc32(str(numbers[k]).encode()))
    contents: dict[int, list] = {}
    steady: list[bool] = []
    varies: list[bool] = []
    names: list[str] = []

    def read(position: int, seed: int = SEED) -> list[tuple[int, int, str, str]]:
        sample = _sample(dataset, position, seed)
        return list(_parts(collate([sample]) if collate else sample))

    for position in order[: MOST_COLLATED if collate else MOST_SAMPLES]:
        if (left := Clock.ends - time.perf_counter()) <= 0:
            break
        if Clock.has_alarm:
            signal.setitimer(signal.ITIMER_REAL, left + 0.5)
        try:
            parts = read(position)
            again = read(position) if len(contents) < 3 else parts
            other = read(position, SEED + 1) if len(contents) < 3 else parts
        except Exception:  # the data set is the script's, and may be closed by now
            break
        finally:
            if Clock.has_alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)  # what was read in time counts
        if not len(parts) == len(again) == len(other):
            return
        # a random generator of the data set itself makes other samples each time
        same = [one[0] == two[0] for one, two in zip(parts, again, strict=True)]
        steady = [a and b for a, b in zip(steady or same, same, strict=False)]
        differs = [one[0] != two[0] for one, two in zip(parts, other, strict=True)]
        varies = [a or b for a, b in zip(varies or differs, differs, strict=False)]
        contents[numbers[position]] = [part[:3] for part in parts]
        names = [part[3] for part in parts]
    if not contents:
        return
    lines = Lines.known.get(id(dataset), {})
    attributes = {name: value for name, value in _attributes(dataset)}
    note(
        "samples",
        dataset=number,
        cls=type(dataset).__name__,
        collated=collate is not None,
        size=len(dataset),
        contents=contents,
        steady=steady,
        varies=varies,
        names=names,
        attributes=attributes,
        lines={name: lines[name] for name in attributes if name in lines},
    )


def _compare_copies(number: int, dataset: Any) -> None:
    """Log whether samples change with what was set in a data set after its workers had been given their copies."""
    loader, changed = known.moved[id(dataset)]
    below = [dataset]
    while (inner := inner_of(below[-1])) is not None:
        below.append(inner)
    read: list[list[list[int]]] = []
    for which in (0, 1, 1):  # as the workers have it, as it is here, and again, because samples may be random
        for (depth, name), values in changed.items():
            setattr(below[depth], name, values[which])
        positions = range(0, len(dataset), max(1, len(dataset) // COMPARED))
        read.append([[part[0] for part in _parts(_sample(dataset, k, SEED))] for k in positions[:COMPARED]])
    copies, here, again = read
    note(
        "worker_copy",
        dataset=number,
        loader=loader,
        cls=type(dataset).__name__,
        names=[name for _, name in changed],
        values_of=[[repr(value) for value in values] for values in changed.values()],
        count=len(here),
        differ=sum(one != two for one, two in zip(copies, here, strict=True)),
        random=here != again,
    )


def _sample(dataset: Any, position: int, seed: int) -> Any:
    torch.manual_seed(seed)  # the same for all: so a sample that has another number on another rank is augmented alike
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    key: Any = position
    if id(dataset) in known.forms:
        form, part = known.forms[id(dataset)]
        key = (*form[:part], position, *form[part + 1 :])
    with torch.no_grad():
        if not hasattr(dataset, "__getitem__") or "__getitems__" in vars(type(dataset)):
            return dataset.__getitems__([key])[0]
        return dataset[key]


def _parts(sample: Any, name: str = "", depth: int = 3) -> Iterator[tuple[int, int, str, str]]:
    """Yield for each part of a sample: a hash of its value, one of its pattern, how to show it, and its name."""
    if isinstance(sample, dict):
        for key in sorted(sample, key=str):
            yield from _parts(sample[key], f"{name}[{key!r}]", depth - 1)
    elif isinstance(sample, list | tuple) and depth and not all(isinstance(each, NUMBERS) for each in sample):
        for number, each in enumerate(sample):
            yield from _parts(each, f"{name}[{number}]", depth - 1)
    else:
        yield hash_of(sample), pattern_of(sample), _shown(sample), name


def hash_of(value: Any) -> int:
    """Return a hash that is the same in each process."""
    if isinstance(value, torch.Tensor):
        return zlib.crc32(f"{value.dtype}{tuple(value.shape)}{fingerprints(value.reshape(1, -1))}".encode())
    if type(value).__module__ == "numpy" or hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    if isinstance(value, set | frozenset):
        return zlib.crc32(repr(sorted(map(repr, value))).encode())
    if isinstance(value, dict):
        return zlib.crc32(repr(sorted((repr(key), repr(each)) for key, each in value.items())).encode())
    if isinstance(value, (str, bytes, list, tuple, type(None), *NUMBERS)):
        return zlib.crc32(repr(value).encode())
    return 0


def pattern_of(value: Any) -> int:
    """Return a hash of which entries of integers are equal to each other; 0 if there are few of them."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() >= 4:
        entries = value.flatten()[:512].tolist()
    elif type(value).__name__ == "ndarray" and value.dtype.kind in "iu" and value.size >= 4:
        entries = value.ravel()[:512].tolist()
    elif isinstance(value, list | tuple) and len(value) >= 4 and all(isinstance(each, int) for each in value):
        entries = list(value[:512])
    else:
        return 0
    first: dict[Any, int] = {}
    pattern = [first.setdefault(entry, len(first)) for entry in entries]
    return zlib.crc32(repr(pattern).encode()) if 1 < len(first) < len(entries) else 0


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else _begin(value.flatten()[:3].tolist(), value.numel())
    if type(value).__name__ == "ndarray":
        return str(value.item()) if value.size == 1 else _begin(value.ravel()[:3].tolist(), value.size)
    return str(value)[:30] if isinstance(value, (str, *NUMBERS)) or hasattr(value, "item") else type(value).__name__


def _begin(values: list[Any], size: int) -> str:
    first = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
    return f"{size} values ({first}, ...)"


def _attributes(dataset: Any) -> Iterator[tuple[str, int]]:
    """Yield the attributes of a data set whose values can be compared over the ranks, with a hash."""
    # what maps names to numbers first: a path may rightly be another one on each rank
    order = (dict, list, tuple, set)
    found = sorted(list(vars(dataset).items())[:64], key=lambda pair: not isinstance(pair[1], order))
    for name, value in found:
        if not name.startswith("_rankdoctor") and isinstance(
            value, dict | list | tuple | set | str | int | torch.Tensor
        ):
            is_one = not hasattr(value, "__len__") or (isinstance(value, torch.Tensor) and not value.dim())
            if is_one or len(value) <= LONGEST:  # type: ignore[arg-type]
                yield name, hash_of(value)
