"""Weak and strong scaling: which runs a study needs, what follows from their samples per second, and the figure.

All ratios are of means; only the cost of communication, which is small, is a median over pairs of trials that were
measured right after each other.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from lab.tables import format_table
from workshop.profiling.throughput import Throughput

KINDS = ("IO", "SYNTHETIC", "FULL", "BARRIER", "COMPUTE")
Trials = dict[str, list[float]]
LINES = {"IO": "tab:blue", "SYNTHETIC": "tab:orange", "FULL": "tab:green"}
TITLES = {
    "weak": "Weak scaling: the same batch for each rank",
    "strong": "Strong scaling: one batch shared by all ranks",
}


@dataclass(frozen=True)
class Setting:
    """One run of the study: how many ranks, and the samples per step of each."""

    ranks: int
    batch_size: int


def powers_of_two(highest: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``highest``."""
    return [2**i for i in range(highest.bit_length())]


def settings(max_ranks: int, batch_size: int, global_batch_size: int) -> dict[str, list[Setting]]:
    """Return the runs of weak scaling (each rank keeps its batch) and strong scaling (all ranks share one batch).

    Strong scaling ends where the batch cannot be shared evenly. A setting may be in both: it is measured once.
    """
    counts = powers_of_two(max_ranks)
    weak = [Setting(ranks, batch_size) for ranks in counts]
    strong = [Setting(ranks, global_batch_size // ranks) for ranks in counts if global_batch_size % ranks == 0]
    return {"weak": weak, "strong": strong}


def joined(earlier: Trials, later: Trials) -> Trials:
    """Return the trials of two rounds together."""
    return {kind: earlier.get(kind, []) + trials for kind, trials in later.items()}


def rows(scaling: str, study: Sequence[Setting], measured: dict[Setting, Trials]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, with what follows from comparing it with the first, which is one rank.

    - ``speedup``: FULL samples/s, in units of one rank's.
    - ``efficiency``: speedup over ranks; 1 is ideal.
    - ``machine_bound``: the efficiency of ranks that compute the same and do not communicate (COMPUTE).
    - ``matrix_bound``: that of matrix products, which need no memory to speak of; None where not measured.
    - ``share_of_bound``: efficiency over machine_bound, so what communication and loading leave of it.
    - ``with_communication``: SYNTHETIC over COMPUTE of the same ranks.
    - ``communication_overhead``: 1 minus that: the share of a step's time that communication takes.
    - ``with_barrier`` and ``waiting``: the same two for BARRIER, so for waiting without gradients to send.
    """
    first = measured[study[0]]
    found = []
    for setting in study:
        trials = measured[setting]

        def efficiency(kind: str, ranks: int = setting.ranks, trials: Trials = trials) -> float:
            return statistics.mean(trials[kind]) / statistics.mean(first[kind]) / ranks

        with_communication, with_barrier = (_against_compute(trials, kind) for kind in ("SYNTHETIC", "BARRIER"))
        found.append(
            {
                "scaling": scaling,
                "ranks": setting.ranks,
                "batch_size": setting.batch_size,
                **{kind: Throughput(trials[kind]).to_dict() for kind in KINDS},
                "speedup": setting.ranks * efficiency("FULL"),
                "efficiency": efficiency("FULL"),
                "machine_bound": efficiency("COMPUTE"),
                "matrix_bound": efficiency("MATRIX") if "MATRIX" in trials else None,
                "share_of_bound": efficiency("FULL") / efficiency("COMPUTE"),
                "with_communication": with_communication,
                "communication_overhead": 1 - with_communication,
                "with_barrier": with_barrier,
                "waiting_for_ranks": 1 - with_barrier,
            }
        )
    return found


def _against_compute(trials: Trials, kind: str) -> float:
    """Return the speed of one kind of trial over that of COMPUTE, as the median of pairs."""
    return statistics.median(speed / alone for speed, alone in zip(trials[kind], trials["COMPUTE"], strict=True))


def scaling_table(found: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    ratios = ("efficiency", "upper bound", "of bound", "communication", "waiting for ranks")
    header = ["scaling", "ranks", "batch/rank", *KINDS, *ratios]
    return format_table(header, [cells(row) for row in found])


def cells(row: dict[str, Any]) -> list[str]:
    """Return what a table shows of a row: samples/s as mean +/- std, ratios in percent."""
    throughputs = [str(Throughput(row[kind]["trials"])) for kind in KINDS]
    names = ("efficiency", "machine_bound", "share_of_bound", "communication_overhead", "waiting_for_ranks")
    return [
        row["scaling"],
        str(row["ranks"]),
        str(row["batch_size"]),
        *throughputs,
        *(f"{row[name]:.0%}" for name in names),
    ]


def diagnosis(found: list[dict[str, Any]]) -> str:
    """Say in words how well one kind of scaling works up to its largest number of ranks, and what limits it."""
    last = found[-1]
    if last["ranks"] == 1:
        return f"{last['scaling'].capitalize()} scaling: only one rank, so nothing to compare."
    if (full := Throughput(last["FULL"]["trials"])).noisy:
        name = f"{last['scaling'].capitalize()} scaling, {last['ranks']} ranks"
        return f"{name}: too noisy for a diagnosis, the trials of FULL gave {full} samples/s. Other work runs here."
    matrix = "" if last["matrix_bound"] is None else f"; matrix products alone, {last['matrix_bound']:.0%}"
    name = f"{last['scaling'].capitalize()} scaling, 1 to {last['ranks']} ranks"
    return (
        f"{name}: {last['speedup']:.2f} times the samples/s of one, {last['efficiency']:.0%} of ideal. "
        f"Ranks that do not communicate reach {last['machine_bound']:.0%} of ideal here{matrix}. "
        f"With communication, the same ranks train at {last['with_communication']:.2f} of their speed without; with "
        f"nothing but a barrier in each step, at {last['with_barrier']:.2f}."
    )


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
    axis.set_ylim(bottom, top * (top / bottom) ** 0.4)  # space for the legend
    axis.yaxis.set_major_locator(LogLocator(numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.legend(loc="upper left", fontsize=9.5)


def _draw_efficiency(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    axis.axhline(1, color="black", linestyle=":", label="ideal")
    axis.plot(ranks, [row["machine_bound"] for row in rows], "s--", color="grey", label="upper bound: no communication")
    if all(row["matrix_bound"] is not None for row in rows):
        axis.plot(
            ranks, [row["matrix_bound"] for row in rows], "^--", color="tab:brown", label="upper bound: matrix products"
        )
    axis.plot(ranks, [row["efficiency"] for row in rows], "o-", color=LINES["FULL"], label="FULL")
    highest = max(1, *(row[name] or 0 for row in rows for name in ("machine_bound", "efficiency", "matrix_bound")))
    axis.set(title="Efficiency", ylabel="speed over ranks times one rank's speed", ylim=(0, 1.1 * highest))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left", fontsize=9.5)


def _draw_overhead(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    overhead, waiting = ([row[name] for row in rows] for name in ("communication_overhead", "waiting_for_ranks"))
    axis.plot(ranks, overhead, "o-", color="tab:red", label="with communication (SYNTHETIC)")
    axis.plot(ranks, waiting, "s--", color="tab:purple", label="with a barrier alone (BARRIER)")
    for count, value in zip(ranks, overhead, strict=True):
        label = axis.annotate(f"{value:.1%}", (count, value), (0, 9), textcoords="offset points", ha="center")
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # the line may pass here
    axis.axhline(0, color="black", linewidth=1)
    axis.set(title="Communication overhead", ylabel="samples/s lost, of those without (COMPUTE)")
    both = overhead + waiting
    axis.set_ylim(min(-0.02, 1.3 * min(both)), max(0.1, 1.6 * max(both)))  # space for the legend
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="upper left", fontsize=9.5)


def _ranks_axis(axis: Axes, ranks: list[int]) -> None:
    margin = 1.15 * (ranks[-1] / ranks[0]) ** 0.07
    axis.set(xlabel="ranks", xscale="log", xlim=(ranks[0] / margin, ranks[-1] * margin))
    axis.xaxis.set_major_locator(FixedLocator(ranks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    axis.xaxis.set_minor_locator(FixedLocator([]))
    axis.grid(alpha=0.25)
