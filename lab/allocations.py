"""When PyTorch allocated and freed memory on the CPU, as its profiler saw it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def recorder() -> profile:
    """Return a profiler that sees each allocation on the CPU, to be used in a with statement."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would only log that there is no GPU
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def trace_events(recorded: profile) -> list[dict[str, Any]]:
    """Return what a profiler has recorded, by time: among it "[memory]" events, with ``args["Bytes"]``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def peak_of(events: list[dict[str, Any]], level: int) -> int:
    """Return the peak of the allocated bytes.

    Args:
        events: as from `trace_events`.
        level: bytes allocated before the first event.
    """
    peak = level
    for event in events:
        if event["name"] == "[memory]":
            level += event["args"]["Bytes"]
            peak = max(peak, level)
    return peak
