"""Weak and strong scaling: which runs a study needs, what follows from their samples per second, and the figure.

One ratio says what communication costs: FULL over COMPUTE, which is the throughput of the same ranks without
communication. It is computed for each pair of trials that were measured right after each other. The median of these
pairs is shown with the lowest and the highest one, because on a busy machine they differ widely.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, PercentFormatter

from lab.tables import format_table
from workshop.profiling.throughput import Throughput

KINDS = ("IO", "SYNTHETIC", "FULL", "BARRIER", "COMPUTE")
Trials = dict[str, list[float]]
LINES = {"COMPUTE": "tab:grey", "FULL": "tab:green"}
LABELS = {"COMPUTE": "COMPUTE: without communication", "FULL": "FULL: with communication"}
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
    """Return a row for each number of ranks: samples/s of each kind, and the `Ratio` of FULL to COMPUTE."""
    found = []
    for setting in study:
        throughputs = {kind: Throughput(measured[setting][kind]).to_dict() for kind in KINDS}
        row = {"scaling": scaling, "ranks": setting.ranks, "batch_size": setting.batch_size, **throughputs}
        found.append(row | {"full_over_compute": asdict(full_over_compute(row))})
    return found


@dataclass(frozen=True)
class Ratio:
    """The ratio of two kinds of throughput, over pairs of trials."""

    median: float
    lowest: float
    highest: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.0%}, from {self.lowest:.0%} to {self.highest:.0%}"


def full_over_compute(row: dict[str, Any]) -> Ratio:
    """Return FULL over COMPUTE of one row of a study: 1 means that communication costs no time."""
    pairs = zip(row["FULL"]["trials"], row["COMPUTE"]["trials"], strict=True)
    ratios = [with_communication / without for with_communication, without in pairs]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def scaling_table(found: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    header = ["scaling", "ranks", "batch/rank", *KINDS, "FULL/COMPUTE", "lowest", "highest"]
    return format_table(header, [cells(row) for row in found])


def cells(row: dict[str, Any]) -> list[str]:
    """Return what a table shows of a row: samples/s as mean +/- std, then the ratio with its spread."""
    throughputs = [str(Throughput(row[kind]["trials"])) for kind in KINDS]
    ratio = full_over_compute(row)
    spread = [f"{value:.0%}" for value in (ratio.median, ratio.lowest, ratio.highest)]
    return [row["scaling"], str(row["ranks"]), str(row["batch_size"]), *throughputs, *spread]


def diagnosis(found: list[dict[str, Any]]) -> str:
    """Say in words what communication costs with the largest number of ranks of one kind of scaling."""
    last = found[-1]
    name = last["scaling"].capitalize()
    if last["ranks"] == 1:
        return f"{name} scaling: only one rank, so nothing to compare."
    name += f" scaling, {last['ranks']} ranks"
    if (full := Throughput(last["FULL"]["trials"])).noisy:
        return f"{name}: too noisy for a diagnosis, the trials of FULL gave {full} samples/s. Other work runs here."
    ratio = full_over_compute(last)
    measured = (
        f"{name}: with communication the ranks reach {ratio.median:.0%} of their throughput without it (the median of "
        f"{ratio.pairs} pairs of trials, which range from {ratio.lowest:.0%} to {ratio.highest:.0%})."
    )
    if ratio.lowest < 1 <= ratio.highest:
        return f"{measured} The range includes 100%, so the cost of communication is not larger than the noise."
    return measured


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw throughput, and the ratio of FULL to COMPUTE, for each kind of scaling into a PNG."""
    kinds = [kind for kind in TITLES if any(row["scaling"] == kind for row in rows)]
    figure = Figure(figsize=(11, 4.2 * len(kinds)), layout="constrained")
    for part, kind in zip(figure.subfigures(len(kinds), squeeze=False)[:, 0], kinds, strict=True):
        part.suptitle(TITLES[kind], fontsize=14, fontweight="bold")
        found = [row for row in rows if row["scaling"] == kind]
        throughput, ratio = part.subplots(1, 2)
        _draw_throughput(throughput, found)
        _draw_ratio(ratio, found)
        for axis in (throughput, ratio):
            ranks = [row["ranks"] for row in found]
            axis.set(xlabel="ranks", xlim=(0, 1.1 * ranks[-1]))
            axis.xaxis.set_major_locator(FixedLocator(ranks))
            axis.grid(alpha=0.25)
    figure.savefig(file, dpi=110)


def _draw_throughput(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    for kind, colour in LINES.items():
        means, deviations = ([row[kind][name] for row in rows] for name in ("mean", "std"))
        axis.errorbar(ranks, means, deviations, fmt="o-", color=colour, capsize=4, label=LABELS[kind])
    axis.set(title="Throughput, mean and standard deviation", ylabel="samples/s", ylim=(0, None))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.legend(loc="lower right", fontsize=9.5)


def _draw_ratio(axis: Axes, rows: list[dict[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    ratios = [full_over_compute(row) for row in rows]
    medians = [ratio.median for ratio in ratios]
    lengths = [[r.median - r.lowest for r in ratios], [r.highest - r.median for r in ratios]]
    axis.errorbar(ranks, medians, lengths, fmt="o-", color="tab:red", capsize=4, label="median, lowest, highest pair")
    axis.axhline(1, color="black", linestyle=":", label="communication costs nothing")
    axis.set(title="FULL over COMPUTE", ylabel="share of the throughput without communication")
    axis.set_ylim(0, 1.1 * max(1, *(ratio.highest for ratio in ratios)))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower right", fontsize=9.5)
