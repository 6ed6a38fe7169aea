"""The plot of a trace with an emulated GPU: what the CPU does, and below it what the GPU does, step by step."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.emulated_gpu import WAIT
from workshop.profiling.chrome_trace import CPU_RANGE, Event, launched_within, read_events

Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds"""
COLOURS = {
    "gets the next batch": "#E69F00",
    "launches forward and backward": "#D55E00",
    "waits for the GPU": "#BBBBBB",
    "forward": "#56B4E9",
    "backward": "#0072B2",
}
"""of what CPU and GPU do; also for people who are colour-blind (Okabe and Ito)"""
CPU, GPU = 1.0, 0.0
"""the height of the two rows"""


def spans(events: list[Event], zero: float) -> Spans:
    """Return when events happened."""
    return [((event["ts"] - zero) / 1e3, event["dur"] / 1e3) for event in events]


def read_timeline(trace: Path) -> dict[str, Spans]:
    """Return when CPU and GPU did what, in the traced steps; the time begins with the first of them."""
    events = read_events(trace)
    ranges = {
        name: [event for event in events if event.get("cat") == CPU_RANGE and event["name"] == name]
        for name in ("data", "forward", "backward")
    }
    zero = ranges["data"][0]["ts"]
    found = {
        "gets the next batch": spans(ranges["data"], zero),
        "launches forward and backward": spans(ranges["forward"] + ranges["backward"], zero),
        "waits for the GPU": spans([event for event in events if event.get("cat") == WAIT], zero),
    }
    for name in ("forward", "backward"):
        found[name] = [span for work in launched_within(events, ranges[name]) for span in spans(work, zero)]
    return found


def step_milliseconds(trace: Path) -> float:
    """Return what a traced step took on the GPU, from the beginning of the first forward to that of the last."""
    starts = [start for start, _ in read_timeline(trace)["forward"]]
    return (starts[-1] - starts[0]) / (len(starts) - 1)


def plot(traces: Mapping[str, Path], title: str, file: Path) -> None:
    """Draw traces, by title, one below the other on the same scale into a PNG; the numbers are those of the steps."""
    figure = Figure(figsize=(10, 0.9 + 1.55 * len(traces)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
    timelines = {name: read_timeline(trace) for name, trace in traces.items()}
    total = max(start + length for found in timelines.values() for spans in found.values() for start, length in spans)
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, timeline, total)
        axes.set_title(name, loc="left", fontsize=11)
    panels[-1].set(xlim=(0, None), xlabel="milliseconds")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        ncols=5,
        loc="outside lower center",
        fontsize=9,
    )
    figure.savefig(file)


def steps_launched_together(launches: list[float], apart: float) -> list[tuple[float, str]]:
    """Return where to write the numbers of the steps: "1, 2, 3" at the first of steps less than ``apart`` apart."""
    groups: list[list[tuple[float, int]]] = []
    for number, launched in enumerate(launches, start=1):
        if groups and launched - groups[-1][-1][0] < apart:
            groups[-1].append((launched, number))
        else:
            groups.append([(launched, number)])
    return [(group[0][0], ", ".join(str(number) for _, number in group)) for group in groups]


def _draw(axes: Axes, timeline: Mapping[str, Spans], total: float) -> None:
    """Draw one panel; the axis is ``total`` milliseconds long."""
    for name, found in timeline.items():
        row = GPU if name in ("forward", "backward") else CPU
        # A launch takes less than a millisecond: without a width of its own, its line would not be seen.
        width = 1.5 if name.startswith("launches") else 0
        axes.broken_barh(found, (row - 0.35, 0.7), facecolor=COLOURS[name], edgecolor=COLOURS[name], linewidth=width)
    launches = [launched for launched, _ in timeline["launches forward and backward"][: len(timeline["forward"])]]
    for place, numbers in steps_launched_together(launches, 0.03 * total):
        colour = COLOURS["launches forward and backward"]
        side = "left" if "," in numbers else "center"  # several numbers need more space than is left of the first step
        axes.text(place, CPU + 0.38, numbers, ha=side, va="bottom", fontsize=9, color=colour)
    for number, (began, length) in enumerate(timeline["forward"], start=1):
        axes.text(began + length / 2, GPU, str(number), ha="center", va="center", fontsize=9)
    axes.set(ylim=(-0.5, 1.75), yticks=(GPU, CPU), yticklabels=("emulated GPU", "CPU"))
