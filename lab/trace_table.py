"""What a trace says in figures: time by kernel on a GPU, by operator on a CPU."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
"""what torch.profiler calls the kinds of work that a GPU does"""


def trace_table(file: Path, rows: int = 30) -> dict[str, Any]:
    """Return the names that took most time of the traced steps, with calls and milliseconds per step, and their share.

    Time is self time: what was called within a call counts as its own.
    """
    with gzip.open(file) as trace:
        events = [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]
    steps = {event["name"]: event["dur"] for event in events if re.match(r"ProfilerStep#", event["name"])}
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    self_time = _self_time(on_gpu or [event for event in events if event.get("cat") == "cpu_op"])
    total = sum(microseconds for _, microseconds in self_time.values())
    ordered = sorted(self_time.items(), key=lambda item: -item[1][1])
    return {
        "clock": "GPU" if on_gpu else "CPU",
        "steps": len(steps),
        "step_ms": sum(steps.values()) / len(steps) / 1000,
        "busy_ms_per_step": total / len(steps) / 1000,
        "names": len(self_time),
        "rows": [
            {
                "name": name,
                "calls_per_step": calls / len(steps),
                "ms_per_step": microseconds / len(steps) / 1000,
                "share": microseconds / total,
            }
            for name, (calls, microseconds) in ordered[:rows]
        ],
    }


def _self_time(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return calls and microseconds by name; events of one thread, or stream, lie within each other or apart."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    open_calls: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        around = open_calls[event["pid"], event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            found[around[-1]["name"]][1] -= event["dur"]
        found[event["name"]][0] += 1
        found[event["name"]][1] += event["dur"]
        around.append(event)
    return found
