"""A plot of a trace: what ran when, on one line each, read from the Chrome trace that ``--trace true`` writes."""

from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from workshop.profiling.chrome_trace import CPU_RANGE, GPU_WORK, Event, launched_within, read_events, span_of

Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds"""
COLORS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73", "worker": "#D55E00"}
COLORS |= {"all-reduces": "#CC79A7", "kernels": "#000000", "copies": "#999999"}
"""of the rows, from top to bottom, by their first word; also for people who are color-blind (Okabe and Ito)"""
STEP_RANGES = ("data", "forward", "backward", "optimizer")


def read_rows(file: Path) -> dict[str, list[Spans]]:
    """Return what each row shows: lanes of spans, of which only ``all-reduces`` has several, one for each bucket.

    With a GPU, the rows ``forward``, ``backward`` and ``optimizer`` are the time that the GPU worked on what was
    launched in these ranges. The CPU's own time is in the rows ``forward launches`` and so on. The row ``data`` is
    always the CPU's: there the training process waits for the next batch. A row without spans is left out.
    """
    events = read_events(file)
    by_category = defaultdict[str, list[Event]](list)
    for event in events:
        by_category[event.get("cat", "")].append(event)
    ranges = {name: [event for event in by_category[CPU_RANGE] if event["name"] == name] for name in STEP_RANGES}
    rows = defaultdict[str, Spans](list)
    for name, its_ranges in ranges.items():
        if name != "data" and any(by_category[category] for category in GPU_WORK):
            rows[name] = [span_of(work) for work in launched_within(events, its_ranges) if work]
            rows[f"{name} launches"] = _spans(its_ranges)
        else:
            rows[name] = _spans(its_ranges)
    for event in by_category["loader_worker"]:
        rows[event["name"]] += _spans([event])
    rows["all-reduces"] = _spans(_all_reduces_of_gradients(events, ranges["backward"]))
    rows["kernels on the GPU"] = _spans([event for event in by_category["kernel"] if "AllReduce" not in event["name"]])
    rows["copies on the GPU"] = _spans(by_category["gpu_memcpy"])
    order = sorted(filter(rows.get, rows), key=lambda row: (list(COLORS).index(row.partition(" ")[0]), row))
    buckets = round(len(rows["all-reduces"]) / max(1, len(rows["data"]))) or 1
    lanes = dict.fromkeys(order, 1) | {"all-reduces": buckets}
    return {row: [rows[row][lane :: lanes[row]] for lane in range(lanes[row])] for row in order}


def _spans(events: list[Event]) -> Spans:
    return [(event["ts"] / 1000, event["dur"] / 1000) for event in events]


def _all_reduces_of_gradients(events: list[Event], backward: list[Event]) -> list[Event]:
    """Return the all-reduces that are launched, or over gloo begin, within the CPU's ranges ``backward``.

    The ranks reduce other values too, such as the sum of the losses; they do so between two steps. A CUDA graph that is
    replayed has no ranges, so there all of NCCL's kernels are returned.
    """
    over_nccl = [event for event in events if event.get("cat") == "kernel" and "AllReduce" in event["name"]]
    if over_nccl and backward:
        launched = [event for work in launched_within(events, backward) for event in work]
        return [event for event in launched if "AllReduce" in event["name"]]
    over_gloo = [event for event in events if event["name"] == "gloo:all_reduce"]
    return over_nccl or [
        event for event in over_gloo if any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in backward)
    ]


def plot_traces(traces: dict[str, Path]) -> Figure:
    """Return a plot of traces, by title, one below the other on the same scale; a step begins at each dotted line."""
    rows_of = {title: read_rows(file) for title, file in traces.items()}
    heights = [1 + 0.4 * len(rows) for rows in rows_of.values()]
    figure = Figure(figsize=(10, sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(rows_of), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rows) in zip(panels, rows_of.items(), strict=True):
        steps = rows["data"][0]
        zero = steps[0][0]
        for place, (row, lanes) in enumerate(rows.items()):
            height = 0.8 / len(lanes)
            style = {"color": COLORS[row.partition(" ")[0]], "linewidth": 0}
            if row.startswith("worker"):  # which may begin the next batch at once: an edge separates the two
                style |= {"edgecolor": "white", "linewidth": 1}
            for lane, spans in enumerate(lanes):
                bars = [(start - zero, length) for start, length in spans]
                axes.broken_barh(bars, (place - 0.4 + lane * height, height), **style)
        for start, _ in steps:
            axes.axvline(start - zero, color="black", linewidth=0.8, linestyle=":")
        labels = [f"{len(lanes)} {row}" if len(lanes) > 1 else row for row, lanes in rows.items()]
        axes.set(xmargin=0, ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=labels)
        axes.set_title(title, loc="left", fontsize=12)
    panels[-1].set(xlim=(0, None), xlabel="milliseconds")
    return figure
