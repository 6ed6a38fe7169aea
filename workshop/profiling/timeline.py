"""A trace as a picture: who was busy when, a row each, read from the Chrome trace that ``--trace true`` writes."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds"""
COLOURS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73", "worker": "#D55E00"}
COLOURS |= {"all-reduces": "#CC79A7", "kernels": "#000000", "copies": "#999999"}
"""of the rows, from top to bottom, by their first word: people who see few colours can tell them apart (Okabe, Ito)"""


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
        at, length = event["ts"] / 1000, event.get("dur", 0) / 1000
        if name == "gloo:all_reduce" and any(start <= at <= start + took for start, took in found["backward"]):
            row = "all-reduces"  # what else the ranks agree on, between two steps, is not about gradients
        if row.partition(" ")[0] in COLOURS:
            found[row].append((at, length))
    order = sorted(filter(found.get, found), key=lambda row: (list(COLOURS).index(row.partition(" ")[0]), row))
    lanes = {row: 1 for row in order} | {"all-reduces": round(len(found["all-reduces"]) / len(found["data"])) or 1}
    return {row: [found[row][lane :: lanes[row]] for lane in range(lanes[row])] for row in order}


def picture(traces: dict[str, Path]) -> Figure:
    """Return traces, by their titles, one below the other on the same scale; a dotted line where each step begins."""
    found = {title: read_rows(file) for title, file in traces.items()}
    heights = [1 + 0.4 * len(rows) for rows in found.values()]
    figure = Figure(figsize=(10, sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(found), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rows) in zip(panels, found.items(), strict=True):
        first = rows["data"][0][0][0]
        for place, (row, lanes) in enumerate(rows.items()):
            for lane, spans in enumerate(lanes):
                where = (place - 0.4 + 0.8 * lane / len(lanes), 0.8 / len(lanes))
                colour = COLOURS[row.partition(" ")[0]]
                axes.broken_barh([(start - first, length) for start, length in spans], where, color=colour, linewidth=0)
        for start, _ in rows["data"][0]:
            axes.axvline(start - first, color="black", linewidth=0.8, linestyle=":")
        labels = [f"{len(lanes)} {row}" if len(lanes) > 1 else row for row, lanes in rows.items()]
        axes.set(xmargin=0, ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=labels)
        axes.set_title(title, loc="left", fontsize=12)
    panels[-1].set(xlim=(0, None), xlabel="milliseconds")
    return figure
