"""Read the Chrome traces of ``torch.profiler``: times on the CPU, and times on the GPU.

With a GPU the two differ. The CPU launches kernels and goes on, so its ranges (``forward``, ``backward``, ...) say how
long launching took. The time of the work itself is that on the GPU, from the first to the last kernel or copy that was
launched within the CPU's range (`launched_within`).

The profiler also writes ranges of the GPU, category ``gpu_user_annotation``, which have the same names as the CPU's.
They are not used here, because they leave out all kernels that another thread launched. That is the case for almost all
of backward, which runs in a thread of autograd: https://github.com/pytorch/pytorch/issues/144778
"""

import gzip
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

Event = dict[str, Any]
CPU_RANGE = "user_annotation"
"""the category of ranges of the CPU, among them the profiler's own, such as ``ProfilerStep#12``"""
LAUNCHES = {"cuda_runtime", "cuda_driver"}
"""the categories of the CPU's calls that give the GPU work"""
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""the categories of what the GPU does"""


def read_events(file: Path) -> list[Event]:
    """Return the events of a compressed trace that have a length, ordered by their start; times in microseconds."""
    with gzip.open(file, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def launched_within(events: list[Event], ranges: list[Event]) -> list[list[Event]]:
    """Return for each of these ranges of the CPU the GPU's work that was launched within it, by any thread.

    Args:
        events: all events of the trace.
        ranges: those ranges of the CPU that the question is about; ordered by their start, and without overlap.
    """
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [event["ts"] for event in ranges]
    found: list[list[Event]] = [[] for _ in ranges]
    for event in events:
        at = launched_at.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in GPU_WORK or at is None:
            continue
        number = bisect_right(starts, at) - 1
        if number >= 0 and at <= starts[number] + ranges[number]["dur"]:
            found[number].append(event)
    return found


def span_of(work: list[Event]) -> tuple[float, float]:
    """Return start and length, in milliseconds, from where the first of these events starts to where the last ends."""
    start = min(event["ts"] for event in work)
    return start / 1000, (max(event["ts"] + event["dur"] for event in work) - start) / 1000
