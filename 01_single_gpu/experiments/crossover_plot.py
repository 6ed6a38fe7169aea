"""The crossover figure: how long each backend takes at each size, and who is the fastest where."""

import math
import re
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from conclusions import describe_leads, fastest, leads, measured_sweeps
from sweep import Measurement

COLUMNS = 3
COLOURS = {
    ("numpy", False): "tab:blue",
    ("torch", False): "tab:orange",
    ("torch.compile", False): "tab:purple",
    ("jax", False): "tab:pink",
    ("torch", True): "tab:green",
    ("torch.compile", True): "tab:olive",
    ("cupy", True): "tab:red",
    ("jax", True): "tab:brown",
}


def plot(rows: list[Measurement], file: Path) -> None:
    """Draw a panel for each sweep into a PNG: time by size, the background in the colour of whoever is the fastest.

    Of several CPU thread counts only the smallest and the largest are drawn.
    """
    sweeps = {title: _to_draw(found) for title, found in measured_sweeps(rows).items()}
    columns = min(COLUMNS, len(sweeps) + 1)  # one panel more than sweeps: the legend
    figure = Figure(figsize=(4.6 * columns, 4.2 * math.ceil((len(sweeps) + 1) / columns)), layout="constrained")
    message = textwrap.fill(_message(list(sweeps.values())), 35 * columns)
    figure.suptitle(message, fontsize=14, fontweight="bold")
    axes = figure.subplots(math.ceil((len(sweeps) + 1) / columns), columns, squeeze=False).ravel()
    for axis in axes[len(sweeps) :]:
        axis.axis("off")
    _draw_legend(axes[len(sweeps)], [row for found in sweeps.values() for row in found])
    for axis, (title, found) in zip(axes, sweeps.items(), strict=False):
        axis.set_title(f"{found[0].experiment}: {title}", fontsize=11)
        _draw_lines(axis, found)
        _draw_leads(axis, [row for row in found if not row.copied])
    figure.savefig(file, dpi=110)


def _to_draw(rows: list[Measurement]) -> list[Measurement]:
    """Leave out the thread counts between the smallest and the largest of each backend."""
    counts: dict[str, set[int | None]] = {}
    for row in rows:
        counts.setdefault(row.backend, set()).add(row.threads or 0)
    return [r for r in rows if r.threads in (None, 1, max(counts[r.backend]))]


def _message(sweeps: list[list[Measurement]]) -> str:
    """Return the title: what the leads of all sweeps come to."""
    if len(sweeps) == 1:
        return describe_leads([row for row in sweeps[0] if not row.copied])
    accelerator = any(row.on_accelerator for rows in sweeps for row in rows)
    smallest, largest = 0, 0
    for rows in sweeps:
        found = leads([row for row in rows if not row.copied])
        first, last = _leader(rows, found[0].label), _leader(rows, found[-1].label)
        smallest += first.threads == 1
        largest += last.on_accelerator if accelerator else last.threads != 1
    big = "an accelerator" if accelerator else "more than one thread"
    return (
        f"At the smallest size one CPU thread wins {smallest} of {len(sweeps)} problems; "
        f"at the largest, {big} wins {largest}"
    )


def _leader(rows: list[Measurement], label: str) -> Measurement:
    return next(row for row in rows if row.label == label)


def _style(row: Measurement) -> dict:
    """Colour by backend; dashed for one thread, dotted for a counted copy, solid for the full machine."""
    return {
        "color": COLOURS.get((row.backend, row.on_accelerator), "black"),
        "linestyle": ":" if row.copied else "--" if row.threads == 1 else "-",
        "marker": "o",
        "markersize": 4,
        "linewidth": 1.8,
        "markerfacecolor": "white" if row.threads == 1 or row.copied else None,
    }


def _draw_lines(axis: Axes, rows: list[Measurement]) -> None:
    for label in dict.fromkeys(row.label for row in rows):
        line = [row for row in rows if row.label == label]
        axis.plot([row.size for row in line], [row.seconds for row in line], **_style(line[0]))
    axis.set(xscale="log", yscale="log", xlabel=f"size: {rows[0].unit}", ylabel="time")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.16)  # space for the names of the fastest
    axis.yaxis.set_major_locator(LogLocator(numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(_time_tick))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size < 1e6 else f"{size / 1e6:g} M"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.25)


def _time_tick(seconds: float, _: int) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.999:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds * 1e9:g} ns"


def _draw_leads(axis: Axes, rows: list[Measurement]) -> None:
    """Shade the range of sizes of each lead and name who leads; a line marks each crossover."""
    sizes, found = list(fastest(rows)), leads(rows)
    edges = [math.sqrt(lead.size * sizes[sizes.index(lead.size) - 1]) for lead in found[1:]]
    left, right = axis.get_xlim()
    for lead, start, end in zip(found, [left, *edges], [*edges, right], strict=True):
        leader = _leader(rows, lead.label)
        colour = _style(leader)["color"]
        axis.axvspan(start, end, color=colour, alpha=0.10 if leader.threads == 1 else 0.22, linewidth=0)
        name = re.sub(r" \(| (?=on )|(?<=\.)", "\n", lead.label).rstrip(")")  # short lines: the range may be narrow
        axis.text(
            math.sqrt(start * end),
            0.98,
            name,
            color="black",
            fontsize=8.5,
            ha="center",
            va="top",
            transform=axis.get_xaxis_transform(),
        )
    for edge in edges:
        axis.axvline(edge, color="black", linewidth=1)
    axis.set_xlim(left, right)


def _draw_legend(axis: Axes, rows: list[Measurement]) -> None:
    first = {row.label: row for row in rows}
    handles = [Line2D([], [], label=label, **_style(row)) for label, row in first.items()]
    axis.legend(handles=handles, loc="upper left", fontsize=10.5, frameon=False)
    notes = ["Lower is better. The background shows who is", "fastest at that size; a black line is a crossover."]
    if not any(row.on_accelerator for row in rows):
        notes += ["No accelerator: not measured."]
    axis.text(0.02, 0.05, "\n".join(notes), transform=axis.transAxes, fontsize=10.5, va="bottom")
