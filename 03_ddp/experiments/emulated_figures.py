"""What follows from the measurements of emulated_scaling.py: efficiencies and their spread, predictions, the figure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

import prediction
from alpha_beta import Network, Step, equal_buckets, fit, weak_efficiency
from lab.emulated_gpu import PUBLISHED

COLOURS = {"one_bucket": "#D55E00", "many_buckets": "#0072B2"}
LABELS = {"one_bucket": "one bucket", "many_buckets": "a bucket per layer"}


@dataclass(frozen=True)
class Point:
    """A published efficiency: samples/s of so many GPUs over those of the same GPUs without communication."""

    gpus: int
    batch_size: int
    efficiency: float


POINTS = (
    *(Point(32, 64, 0.79), Point(64, 64, 0.77), Point(128, 64, 0.75)),
    *(Point(32, 128, 0.89), Point(64, 128, 0.89), Point(128, 128, 0.88)),
)
"""NERSC, https://github.com/NERSC/sc22-dl-tutorial, figure tutorial_images/scale_perfDiffBS.png of 10 November 2021: 8,
16 and 32 nodes with four A100 each, synthetic data, the solid line over the dashed one. They were read from the
position of the markers. For 32 GPUs and batch 64, where markers cover each other, the dashed line was taken as
straight. The text of that time gives the last one of each batch size: an overhead of 25 % and of 12 %."""
READING_ERROR = 0.01
SAMPLES_PER_SECOND = {64: 1 / PUBLISHED["a100_optimized"].gpu, 128: 98414 / 128}
"""of one of these GPUs without communication, by batch size: SYNTHETIC of one GPU, and the same figure's last marker"""


def efficiency(seconds: Mapping[str, Sequence[float]], kind: str) -> dict[str, Any]:
    """Return the mean and standard deviation of the speed of a kind of step, relative to that without communication.

    The trials are compared in pairs, each with the one that was measured right before it.
    """
    pairs = [alone / step for alone, step in zip(seconds["no_sync"], seconds[kind], strict=True)]
    return {"mean": statistics.mean(pairs), "std": _spread(pairs), "trials": pairs}


def fitted(messages: Sequence[Mapping[str, float]], ranks: int) -> Network:
    """Return latency and bandwidth of the all-reduces that these ranks measured alone."""
    return fit([(row["bytes"], ranks, row["seconds"]) for row in messages])


def predicted(step_seconds: float, gradient_bytes: float, layers: int, ranks: int, network: Network) -> dict[str, Any]:
    """Return what the alpha-beta model says of one bucket, which cannot overlap, and of a bucket for each layer.

    A layer's gradients are ready when its part of backward is done, which is what the model assumes of a bucket. So a
    bucket per layer is predicted twice: with full overlap, and without any.
    """
    one, many = (Step(step_seconds, equal_buckets(gradient_bytes, buckets)) for buckets in (1, layers))
    return {
        "one_bucket": weak_efficiency(one, network, ranks, overlap=True),
        "many_buckets": weak_efficiency(many, network, ranks, overlap=True),
        "many_buckets_no_overlap": weak_efficiency(many, network, ranks, overlap=False),
    }


def rows(
    measured: Mapping[int, Mapping[str, Any]], step_seconds: float, gradient_bytes: float, layers: int
) -> list[dict[str, Any]]:
    """Return a row for each number of ranks.

    Args:
        measured: by ranks: ``step_seconds`` (trials by kind) and ``all_reduce`` (a list for each round).
        step_seconds: what a step takes on the emulated GPU.
        gradient_bytes: of all layers.
        layers: of the model.
    """
    found = []
    for ranks, figures in measured.items():
        seconds = figures["step_seconds"]
        row: dict[str, Any] = {"ranks": ranks, "step_seconds": seconds}
        row["without_communication"] = {
            "mean": statistics.mean(seconds["no_sync"]),
            "std": _spread(seconds["no_sync"]),
        }
        row |= {kind: efficiency(seconds, kind) for kind in LABELS}
        if ranks > 1:
            network = fitted(figures["all_reduce"], ranks)
            row |= {"alpha": network.alpha, "beta": network.beta}
            row["predicted"] = predicted(step_seconds, gradient_bytes, layers, ranks, network)
            times = [m["seconds"] for m in figures["all_reduce"] if m["bytes"] >= 0.99 * gradient_bytes]
            row["all_reduce"] = {"mean": statistics.mean(times), "std": _spread(times)}
        found.append(row)
    return found


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def published_curves(counts: Sequence[int]) -> dict[int, list[tuple[float, float]]]:
    """Return what is predicted for NERSC's study by batch size: (without overlap, with overlap) for each count."""
    network = Network(prediction.ALPHA_US * 1e-6, 1e-9 / prediction.GB_PER_SECOND)
    curves = {}
    for batch_size, samples_per_second in SAMPLES_PER_SECOND.items():
        buckets = equal_buckets(4 * prediction.PARAMETERS, prediction.BUCKETS)
        step = Step(batch_size / samples_per_second, buckets)
        found = prediction.curve(step, network, list(counts))
        curves[batch_size] = [found[count] for count in counts]
    return curves


def plot(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the efficiency of the emulated ranks, and beside it published points and the prediction up to 1,024 GPUs."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _plot_emulated(left, found)
    _plot_published(right)
    for axis in (left, right):
        axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(0, 1.08)
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.grid(alpha=0.25)
        axis.legend(loc="lower left", fontsize=9)
    left.set_ylabel("speed, relative to the same ranks\nwithout communication")
    figure.savefig(file, dpi=110)


def _plot_emulated(axis: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    ranks = [row["ranks"] for row in found]
    for (kind, colour), beside in zip(COLOURS.items(), (-0.06, 0.06), strict=True):  # so that none covers the other
        means, stds = [row[kind]["mean"] for row in found], [row[kind]["std"] for row in found]
        places = [count + beside for count in ranks]
        axis.errorbar(places, means, stds, fmt="o", color=colour, capsize=4, label=f"{LABELS[kind]}: measured")
        model = [row["predicted"][kind] if "predicted" in row else 1.0 for row in found]
        axis.plot(ranks, model, "--", color=colour, label=f"{LABELS[kind]}: predicted")
    axis.set(
        title="Emulated GPUs, real communication (gloo)", xlabel="ranks on two CPU cores", xlim=(0, ranks[-1] + 0.5)
    )
    axis.xaxis.set_major_locator(FixedLocator(ranks))


def _plot_published(axis: Axes) -> None:
    counts = [2, 4, 8, *range(16, 1025, 16)]
    colours = dict(zip(SAMPLES_PER_SECOND, ("#E69F00", "#009E73"), strict=True))
    for batch_size, curve in published_curves(counts).items():
        none, full = zip(*curve, strict=True)
        colour = colours[batch_size]
        axis.fill_between(counts, none, full, color=colour, alpha=0.2, linewidth=0)
        axis.plot(counts, full, "-", color=colour, label=f"batch {batch_size}: predicted, full overlap")
        axis.plot(counts, none, "--", color=colour, label=f"batch {batch_size}: predicted, no overlap")
        points = [point for point in POINTS if point.batch_size == batch_size]
        axis.errorbar(
            [point.gpus for point in points],
            [point.efficiency for point in points],
            READING_ERROR,
            fmt="*",
            color=colour,
            markersize=11,
            markeredgecolor="black",
            capsize=3,
            label=f"batch {batch_size}: published by NERSC",
        )
    axis.set(title="Real GPUs: a published study, and its prediction", xlabel="A100 GPUs", xlim=(0, 1040))
    axis.xaxis.set_major_locator(FixedLocator([1, 128, 256, 512, 768, 1024]))
