"""Bars of how long loading and training take for a step: alone, one after the other, and together."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

KINDS = ("IO", "SYNTHETIC", "FULL")


def draw_bars(axes: Any, rates: Mapping[str, Sequence[float]], samples: int) -> None:  # noqa: ANN401
    """Draw a bar for each label: loading alone and training alone, end to end, and a mark for both together.

    Args:
        axes: of matplotlib.
        rates: IO, SYNTHETIC and FULL in samples/s, by label.
        samples: the number whose time is drawn, for example those of a step.
    """
    for place, of_row in enumerate(rates.values()):
        load, train, full = (1000 * samples / rate for rate in of_row)
        labels = ("loading alone", "training alone", "measured together") if place == 0 else (None, None, None)
        axes.barh(place, load, color="#E69F00", label=labels[0])
        axes.barh(place, train, left=load, color="#56B4E9", label=labels[1])
        axes.plot([full, full], [place - 0.48, place + 0.48], color="black", linewidth=3, label=labels[2])
    axes.set_yticks(range(len(rates)), list(rates), fontsize=11)
    axes.set(ylim=(len(rates) - 0.4, -0.6), xlim=(0, None), xlabel="milliseconds per training step")
    axes.spines[["top", "right"]].set_visible(False)


def plot_runs(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG with a bar for each of one or two runs, which are labeled with the flags in which they differ.

    Args:
        runs: contents of ``throughput.json``; the last one says how many samples a step has.
        file: the PNG.
    """
    samples = runs[-1]["samples_per_step"]
    labels = labels_of([run["flags"] for run in runs])
    figure = Figure(figsize=(8, 1.6 + 0.6 * len(runs)), dpi=110, layout="constrained")
    axes = figure.subplots()
    draw_bars(
        axes, {label: [run[kind]["mean"] for kind in KINDS] for label, run in zip(labels, runs, strict=True)}, samples
    )
    axes.set_xlabel(f"milliseconds for {samples:,} samples (a step of this run)")
    axes.set_title(
        "A mark at the end of its bar: no overlap. At the length of its longer part: full overlap",
        fontsize=10,
        loc="left",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    figure.savefig(file)


def labels_of(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return a label for each of at most two lists of flags: which run it is, and its flags that the other lacks."""
    named = [{f"{flag} {value}" for flag, value in pairwise(words) if flag.startswith("--")} for words in runs]
    common = set.intersection(*named) if len(named) > 1 else named[0]
    times = ["the run before", "this run"][-len(runs) :]
    return ["\n".join([time, *sorted(flags - common)]) for time, flags in zip(times, named, strict=True)]
