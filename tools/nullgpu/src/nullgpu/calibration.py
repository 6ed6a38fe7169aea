"""Durations of operations from a trace of torch.profiler, which the user has made on a GPU (``--calibrate``).

An operation is known again by its name and its tensors' shapes and number formats. If only the size of the batch
differs, the duration is scaled by it.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

FORMATS = {
    "torch.float32": "float",
    "torch.float64": "double",
    "torch.float16": "c10::Half",
    "torch.bfloat16": "c10::BFloat16",
}
"""names of number formats in a trace; integers are not told apart"""
OTHERS = ("", "Scalar", "ScalarList", "Device", "GenericList")
"""types of arguments that are no tensors"""
Shape = tuple[str, tuple[Any, ...]]
"""a number format and the sizes; of a list of tensors "TensorList" and all their sizes"""


class Unusable(Exception):
    """The trace does not have what is needed."""


@dataclass(frozen=True)
class Key:
    """What an operation is known by."""

    name: str
    tensors: tuple[Shape, ...]


def read(file: Path) -> dict[Key, float]:
    """Return the seconds of each operation in a trace: the median of its calls, each the sum of its kernels.

    Raises:
        Unusable: it is no trace of PyTorch's profiler with shapes and kernels.
    """
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    except OSError as error:
        raise Unusable(f"--calibrate {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError):
        raise Unusable(f"--calibrate {file}: it is no trace that torch.profiler has exported") from None
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    kernels: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel" and "External id" in event["args"]:
            kernels[event["args"]["External id"]] += 1e-6 * event["dur"]
    remedy = "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] and record_shapes=True"
    if not kernels:
        raise Unusable(f"--calibrate {file}: it has no kernels: {remedy}")
    if not any("Input Dims" in event["args"] for event in operations):
        raise Unusable(f"--calibrate {file}: it has no shapes: {remedy}")
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for key, seconds in totals(operations, kernels):
        found[key].append(seconds)
    return {key: median(calls) for key, calls in found.items()}


def totals(operations: list[dict[str, Any]], kernels: dict[int, float]) -> Iterator[tuple[Key, float]]:
    """Yield the operations with the seconds of their kernels, those of the operations within them included."""
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in operations:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        seconds = [kernels.get(event["args"].get("External id", -1), 0.0) for event in thread]
        open_: list[int] = []  # indices of the operations around the current one, the outermost first
        for i, event in enumerate(thread):
            while open_ and event["ts"] >= thread[open_[-1]]["ts"] + thread[open_[-1]]["dur"]:
                open_.pop()
            for outer in open_:
                seconds[outer] += kernels.get(event["args"].get("External id", -1), 0.0)
            open_.append(i)
        for event, total in zip(thread, seconds, strict=True):
            if total and event["args"].get("Input Dims") and "::" in event["name"]:
                yield key_of_event(event), total


def key_of_event(event: dict[str, Any]) -> Key:
    """Return what an operation of a trace is known by."""
    arguments = zip(event["args"].get("Input type", ()), event["args"]["Input Dims"], strict=False)
    tensors = [(kind, nested(sizes)) for kind, sizes in arguments if kind not in OTHERS]
    known = (*FORMATS.values(), "TensorList")
    return Key(
        event["name"].partition("::")[2], tuple((kind if kind in known else "int", sizes) for kind, sizes in tensors)
    )


def nested(sizes: list[Any]) -> tuple[Any, ...]:
    """Return lists in lists as tuples in tuples."""
    return tuple(nested(one) if isinstance(one, list) else one for one in sizes)


def key_of_call(func: Any, args: Any, kwargs: Any) -> Key:
    """Return what a call of an operation is known by."""
    tensors: list[Shape] = []
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            tensors.append((FORMATS.get(str(value.dtype), "int"), tuple(value.shape)))
        elif isinstance(value, list | tuple) and value and all(hasattr(one, "shape") for one in value):
            tensors.append(("TensorList", tuple(tuple(one.shape) for one in value)))
    return Key(func._schema.name.partition("::")[2], tuple(tensors))


class Calibration:
    """Looks durations up in a trace."""

    def __init__(self, file: Path) -> None:
        self.known = read(file)
        self.of_name: defaultdict[str, list[Key]] = defaultdict(list)
        for key in self.known:
            self.of_name[key.name].append(key)

    def seconds(self, func: Any, args: Any, kwargs: Any, shortest: float) -> float | None:
        """Return the seconds of an operation; None if the trace has nothing like it."""
        key = key_of_call(func, args, kwargs)
        if key in self.known:
            return self.known[key]
        for other in self.of_name[key.name]:
            if times := of_another_batch(key, other):
                least = min(shortest, self.known[other])
                return least + (self.known[other] - least) * times
        return None


def of_another_batch(key: Key, other: Key) -> float:
    """Return the ratio of the sizes that differ, if it is the same for all of them; 0 if it is another operation."""
    if [kind for kind, _ in key.tensors] != [kind for kind, _ in other.tensors]:
        return 0.0
    times = 0.0
    for (kind, sizes), (_, others) in zip(key.tensors, other.tensors, strict=True):
        differing = [(a, b) for a, b in zip(sizes, others, strict=False) if a != b]
        if len(sizes) != len(others) or len(differing) > 1 or (kind == "TensorList" and differing):
            return 0.0
        for a, b in differing:
            if not b or (times and abs(a / b - times) > 1e-9):
                return 0.0
            times = a / b
    return times
