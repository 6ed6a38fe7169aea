"""A table of a trace: time by kernel on a GPU, by operator on a CPU."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from workshop.profiling.chrome_trace import CPU_RANGE, GPU_WORK, Event, launched_within, read_events, span_of


def trace_table(file: Path, rows: int = 30) -> dict[str, Any]:
    """Return the names that took most time of the traced steps, with calls and milliseconds per step, and their share.

    Time is self time: what was called within a call counts as its own. If the trace has work of a GPU, all times are
    measured on the GPU, the length of a step too.
    """
    events = read_events(file)
    # The profiler's ranges on the GPU have the same names, so the category must be checked.
    steps = [e for e in events if e.get("cat") == CPU_RANGE and e["name"].startswith("ProfilerStep#")]
    on_gpu = [event for event in events if event.get("cat") in GPU_WORK]
    self_time = _self_time(on_gpu or [event for event in events if event.get("cat") == "cpu_op"])
    total = sum(microseconds for _, microseconds in self_time.values())
    ordered = sorted(self_time.items(), key=lambda item: -item[1][1])
    return {
        "clock": "GPU" if on_gpu else "CPU",
        "steps": len(steps),
        "step_ms": _step_ms_on_gpu(events, steps) if on_gpu else sum(step["dur"] for step in steps) / len(steps) / 1000,
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


def _step_ms_on_gpu(events: list[Event], steps: list[Event]) -> float:
    """Return how far apart the GPU's work of one step and of the next one start, on average.

    The length of the CPU's ranges would be how long launching took: the CPU may be several steps ahead of the GPU.
    """
    starts = [span_of(work)[0] for work in launched_within(events, steps) if work]
    if len(starts) == len(steps) > 1:
        return (starts[-1] - starts[0]) / (len(steps) - 1)
    _, length = span_of([event for event in events if event.get("cat") in GPU_WORK])
    return length / len(steps)


def _self_time(events: list[Event]) -> dict[str, list[float]]:
    """Return calls and microseconds by name; events of one thread, or stream, lie within each other or apart."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    open_calls: dict[tuple, list[Event]] = defaultdict(list)
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
