"""The figures of `03_ddp/allreduce.py` and `03_ddp/predict.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, PercentFormatter

from alpha_beta import Network, bus_bandwidth_factor
from workshop.measuring.tables import format_seconds


def plot(rows: list[dict[str, float]], ranks: int, network: Network, file: Path) -> None:
    """Draw time and bus bandwidth by message size into a PNG: measured as points, the fitted model as a line."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(f"All-reduce over {ranks} ranks", fontsize=14, fontweight="bold")
    sizes = np.array([row["bytes"] for row in rows])
    line = np.geomspace(sizes[0], sizes[-1], 100)
    times = network.all_reduce_seconds(line, ranks)
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [row["seconds"] for row in rows], "o", color="tab:blue", label="measured")
    left.plot(line, times, color="tab:orange", label="fitted: alpha and beta")
    left.set(title="Time", ylabel="time of one all-reduce", yscale="log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    left.yaxis.set_minor_formatter(NullFormatter())
    right.plot(sizes, [row["bus_gb_per_second"] for row in rows], "o", color="tab:blue", label="measured")
    right.plot(line, line / times / 1e9 * bus_bandwidth_factor(ranks), color="tab:orange", label="fitted")
    right.set(title="Bus bandwidth", ylabel="GB/s", ylim=(0, None))
    for axis in (left, right):
        axis.set(xlabel="message size", xscale="log")
        axis.xaxis.set_major_locator(FixedLocator(sizes[:: 1 + len(sizes) // 6]))
        axis.xaxis.set_major_formatter(FuncFormatter(_size))
        axis.xaxis.set_minor_locator(FixedLocator([]))
        axis.grid(alpha=0.25)
        axis.legend(loc="best")
    figure.savefig(file, dpi=110)


def _size(nbytes: float, _: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def plot_prediction(curves: dict[str, dict[int, tuple[float, float]]], published: Sequence[Any], file: Path) -> None:
    """Draw predicted weak-scaling efficiency by number of ranks into a PNG, with the published points on it.

    Args:
        curves: by name, (efficiency without overlap, with overlap) by number of ranks; a band is drawn between them.
        published: (name of its curve, ranks, efficiency) of each point.
        file: to write.
    """
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axis: Axes = figure.subplots()
    colours = dict(zip(curves, ("tab:orange", "tab:blue", "tab:green", "tab:red"), strict=False))
    for name, found in curves.items():
        ranks = list(found)
        none, full = zip(*found.values(), strict=True)
        axis.fill_between(ranks, none, full, color=colours[name], alpha=0.2, linewidth=0)
        axis.plot(ranks, full, "-", color=colours[name], label=f"{name}: all hidden that can be")
        axis.plot(ranks, none, "--", color=colours[name], label=f"{name}: nothing hidden")
    for name, count, efficiency in published:
        axis.plot(count, efficiency, "*", markersize=16, markeredgecolor="black", color=colours[name])
        text = axis.annotate(f"published {efficiency:.0%}", (count, efficiency), (12, -4), textcoords="offset points")
        text.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # lines pass behind it
    axis.set(title="Weak scaling: predicted bounds", xscale="log", ylim=(0, 1.05))
    axis.set(xlabel="ranks, one per GPU", ylabel="speed over ranks times one rank's speed")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(FixedLocator(ranks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,g}"))
    axis.xaxis.set_minor_locator(FixedLocator([]))
    axis.grid(alpha=0.25)
    axis.legend(loc="lower left")
    figure.savefig(file, dpi=110)
