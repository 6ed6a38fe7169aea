"""A trace as a picture: who was busy when, a row each, read from the Chrome trace that ``--trace true`` writes."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds from the start of the first step"""
PARTS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
OTHERS = {"worker": "#D55E00", "all-reduces": "#CC79A7", "GPU kernels": "#000000", "GPU copies": "#999999"}
"""colours of the rows, which people who see few colours can tell apart (Okabe and Ito 2008)"""


def read_rows(file: Path) -> dict[str, list[Spans]]:
    """Return what each row shows, from top to bottom: lanes of spans; and under ``steps`` where the steps are.

    Only the row of the all-reduces has several lanes, one for each bucket of gradients. Rows without spans are left
    out: on a CPU there are no kernels, and loaders that have no worker processes work during ``data``.
    """
    with gzip.open(file, "rt") as lines:
        events = [event for event in json.load(lines)["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    start, end = min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)
    found = defaultdict[str, Spans](list)
    for event in sorted(events, key=lambda event: event["ts"]):
        if start <= event["ts"] + event["dur"] and event["ts"] <= end:
            found[_row_of(event["cat"], event["name"])].append(((event["ts"] - start) / 1000, event["dur"] / 1000))
    sums = found.pop("all-reduces", [])
    if "GPU kernels" not in found:  # on CPUs the ranks also agree on whether to stop in this way, but between backwards
        sums = [span for span in sums if any(at <= span[0] <= at + length for at, length in found["backward"])]
    buckets = max(1, round(len(sums) / len(steps)))
    workers = sorted(row for row in found if row.startswith("worker"))
    rows = {row: [found[row]] for row in ("steps", *PARTS, *workers)}
    rows["all-reduces"] = [sums[bucket::buckets] for bucket in range(buckets)]
    rows |= {row: [found[row]] for row in ("GPU kernels", "GPU copies")}
    return {row: lanes for row, lanes in rows.items() if any(lanes)}


def _row_of(category: str, name: str) -> str:
    """Return the row of an event, "" if it is not drawn."""
    if category == "user_annotation":
        return "steps" if name.startswith("ProfilerStep#") else {"gloo:all_reduce": "all-reduces"}.get(name, name)
    if category == "kernel":
        return "all-reduces" if "AllReduce" in name else "GPU kernels"
    return {"loader_worker": name, "gpu_memcpy": "GPU copies"}.get(category, "")


def draw(axes: Axes, rows: dict[str, list[Spans]]) -> None:
    """Draw the rows of `read_rows` into ``axes``."""
    names = [name for name in rows if name != "steps"]
    for place, name in enumerate(names):
        colour, lanes = (PARTS | OTHERS).get(name, OTHERS["worker"]), rows[name]
        for number, spans in enumerate(lanes):
            height = 0.8 / len(lanes)
            axes.broken_barh(spans, (place - 0.4 + number * height, height), color=colour, linewidth=0)
    for start, _ in rows["steps"][0]:
        axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
    last, length = rows["steps"][0][-1]
    axes.set(xlim=(0, last + length), ylim=(len(names) - 0.5, -0.5), xlabel="milliseconds; a dotted line begins a step")
    buckets = len(rows.get("all-reduces", []))
    names = [f"{name} ({buckets})" if name == "all-reduces" else name for name in names]
    axes.set_yticks(range(len(names)), names)


def picture(file: Path) -> Figure:
    """Return a trace as a figure."""
    rows = read_rows(file)
    figure = Figure(figsize=(10, 1 + 0.4 * len(rows)), dpi=110, layout="constrained")
    draw(figure.subplots(), rows)
    return figure
