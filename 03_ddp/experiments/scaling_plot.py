"""The figure of a scaling study: throughput, efficiency and communication overhead by number of ranks."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

LINES = {"IO": "tab:blue", "SYNTHETIC": "tab:orange", "FULL": "tab:green"}
TITLES = {
    "weak": "Weak scaling: the same batch for each rank",
    "strong": "Strong scaling: one batch shared by all ranks",
}


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw three panels for each kind of scaling into a PNG; ``rows`` are those of `scaling_study`."""
    kinds = [kind for kind in TITLES if any(row["scaling"] == kind for row in rows)]
    figure = Figure(figsize=(15, 4.6 * len(kinds)), layout="constrained")
    for part, kind in zip(figure.subfigures(len(kinds), squeeze=False)[:, 0], kinds, strict=True):
        part.suptitle(TITLES[kind], fontsize=14, fontweight="bold")
        found = [row for row in rows if row["scaling"] == kind]
        throughput, efficiency, overhead = part.subplots(1, 3)
        _draw_throughput(throughput, found)
        _draw_efficiency(efficiency, found)
        _draw_overhead(overhead, found)
        for axis in (throughput, efficiency, overhead):
            _ranks_axis(axis, [row["ranks"] for row in found])
    figure.savefig(file, dpi=110)


def _draw_throughput(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    for kind, colour in LINES.items():
        means = [row[kind]["mean"] for row in rows]
        # SYNTHETIC is drawn wide, because FULL often lies on it.
        style = {"linewidth": 5, "markersize": 11, "alpha": 0.5} if kind == "SYNTHETIC" else {"markersize": 5}
        axis.errorbar(ranks, means, [row[kind]["std"] for row in rows], fmt="o-", color=colour, label=kind, **style)
        axis.plot(ranks, [means[0] * count for count in ranks], ":", color=colour)
    axis.plot([], [], ":", color="black", label="ideal: ranks times one rank")
    axis.set(title="Throughput", ylabel="samples/s", yscale="log")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.4)  # room for the legend
    axis.yaxis.set_major_locator(LogLocator(numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.legend(loc="upper left", fontsize=9.5)


def _draw_efficiency(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    axis.axhline(1, color="black", linestyle=":", label="ideal")
    axis.plot(ranks, [row["machine_ceiling"] for row in rows], "s--", color="grey", label="ceiling: ranks never talk")
    if all(row["matrix_ceiling"] is not None for row in rows):
        axis.plot(
            ranks, [row["matrix_ceiling"] for row in rows], "^--", color="tab:brown", label="ceiling: matrix products"
        )
    axis.plot(ranks, [row["efficiency"] for row in rows], "o-", color=LINES["FULL"], label="FULL")
    highest = max(1, *(row[name] or 0 for row in rows for name in ("machine_ceiling", "efficiency", "matrix_ceiling")))
    axis.set(title="Efficiency", ylabel="speed over ranks times one rank's speed", ylim=(0, 1.1 * highest))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left", fontsize=9.5)


def _draw_overhead(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    overhead, waiting = ([row[name] for row in rows] for name in ("communication_overhead", "waiting"))
    axis.plot(ranks, overhead, "o-", color="tab:red", label="with communication (SYNTHETIC)")
    axis.plot(ranks, waiting, "s--", color="tab:purple", label="with a barrier alone (BARRIER)")
    for count, value in zip(ranks, overhead, strict=True):
        label = axis.annotate(f"{value:.1%}", (count, value), (0, 9), textcoords="offset points", ha="center")
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # the line may pass here
    axis.axhline(0, color="black", linewidth=1)
    axis.set(title="Communication overhead", ylabel="samples/s lost, of those without (COMPUTE)")
    both = overhead + waiting
    axis.set_ylim(min(-0.02, 1.3 * min(both)), max(0.1, 1.6 * max(both)))  # room for the legend
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="upper left", fontsize=9.5)


def _ranks_axis(axis: Axes, ranks: list[int]) -> None:
    margin = 1.15 * (ranks[-1] / ranks[0]) ** 0.07
    axis.set(xlabel="ranks", xscale="log", xlim=(ranks[0] / margin, ranks[-1] * margin))
    axis.xaxis.set_major_locator(FixedLocator(ranks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    axis.xaxis.set_minor_locator(FixedLocator([]))
    axis.grid(alpha=0.25)
