"""A trace as a picture: who was busy when, a row each, read from the Chrome trace that ``--trace true`` writes."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds"""
COLOURS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73", "worker": "#D55E00"}
COLOURS |= {"all-reduces": "#CC79A7", "kernels": "#000000", "copies": "#999999"}
"""of the rows, from top to bottom, by their first word: people who see few colours can tell them apart (Okabe, Ito)"""
GLOO = "gloo:all_reduce"


def read_rows(file: Path) -> dict[str, list[Spans]]:
    """Return what each row shows: lanes of spans, of which only ``all-reduces`` has several, one for each bucket.

    Who did nothing has no row: loaders without worker processes work during ``data``, and without a GPU there are no
    kernels.
    """
    with gzip.open(file, "rt") as lines:
        events = sorted(json.load(lines)["traceEvents"], key=lambda event: event["ts"])
    found = defaultdict[str, Spans](list)
    for event in events:
        kind, name = event.get("cat"), event["name"]
        row = {"user_annotation": name, "loader_worker": name, "gpu_memcpy": "copies on the GPU"}.get(kind, "")
        if kind == "kernel":
            row = "all-reduces" if "AllReduce" in name else "kernels on the GPU"
        if row == GLOO and any(start <= event["ts"] / 1000 <= start + length for start, length in found["backward"]):
            row = "all-reduces"  # what else the ranks agree on, between two steps, is not about gradients
        if row.partition(" ")[0] in COLOURS:
            found[row].append((event["ts"] / 1000, event["dur"] / 1000))
    buckets = max(1, round(len(found["all-reduces"]) / len(found["data"])))
    order = sorted(found, key=lambda row: (list(COLOURS).index(row.partition(" ")[0]), row))
    rows = {row: [found[row]] for row in order if found[row]}
    if "all-reduces" in rows:
        rows["all-reduces"] = [found["all-reduces"][bucket::buckets] for bucket in range(buckets)]
    return rows


def draw(axes: Axes, rows: dict[str, list[Spans]]) -> float:
    """Draw rows from the first step on, with a dotted line where each step begins; return where they end."""
    first = rows["data"][0][0][0]
    for place, (row, lanes) in enumerate(rows.items()):
        for lane, spans in enumerate(lanes):
            where = (place - 0.4 + 0.8 * lane / len(lanes), 0.8 / len(lanes))
            colour = COLOURS[row.partition(" ")[0]]
            axes.broken_barh([(start - first, length) for start, length in spans], where, color=colour, linewidth=0)
    for start, _ in rows["data"][0]:
        axes.axvline(start - first, color="black", linewidth=0.8, linestyle=":")
    axes.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)))
    axes.set_yticklabels([f"{len(lanes)} {row}" if len(lanes) > 1 else row for row, lanes in rows.items()])
    return max(sum(spans[-1]) for lanes in rows.values() for spans in lanes) - first


def picture(traces: dict[str, Path]) -> Figure:
    """Return traces as a figure, one below the other, under their titles and on the same scale."""
    all_rows = [read_rows(file) for file in traces.values()]
    heights = [len(rows) for rows in all_rows]
    figure = Figure(figsize=(10, 0.5 + 0.5 * len(heights) + 0.36 * sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    ends = [draw(axes, rows) for axes, rows in zip(panels, all_rows, strict=True)]
    for axes, title in zip(panels, traces, strict=True):
        axes.set_title(title, fontsize=12, loc="left")
        axes.set_xlim(0, max(ends))
    panels[-1].set_xlabel("milliseconds; a dotted line begins a step")
    return figure
