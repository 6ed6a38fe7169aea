"""Draw the plot of the front page from the figures in results/: `python lab/render_front.py`.

Left: the throughput of each loader alone, of the training step alone, and of both together. Right: the time of a whole
run to the same accuracy while one thing after the other is changed.
"""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.render import MACHINE, RESULTS, load

STEPS = {
    "standard": "lesson 01, default settings",
    "fp32": "lesson 04: fewer digits, no dropout,\nhigher learning rate, --loader device",
    "fast": "16 bits: bf16",
}
"""what `mnist_fast.yaml` changes, in the order of the bars: each has what those above it have"""
FIGURE = RESULTS / f"{MACHINE}_front.png"


def seconds_to_target(results: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of whole processes that reach the accuracy aimed at, by step."""
    runs = {row["name"]: row["runs"] for row in results["rows"]}
    return {step: statistics.median(run["process_seconds"] for run in runs[step]) for step in STEPS}


def draw(throughputs: dict[str, Any], fast: dict[str, Any], file: Path) -> None:
    """Draw both halves into a PNG."""
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])

    loaders = throughputs["loaders"]
    places = range(len(loaders))
    for kind, label, color, shift in (
        ("IO", "the loader alone", "tab:blue", -0.27),
        ("SYNTHETIC", "the training step alone", "tab:orange", 0),
        ("FULL", "both, as in a real run", "tab:green", 0.27),
    ):
        rates = [found[kind]["mean"] for found in loaders.values()]
        left.bar([place + shift for place in places], rates, 0.26, label=label, color=color)
    left.set_xticks(list(places), [name.replace(", ", ",\n") for name in loaders])
    left.set(yscale="log", ylim=(1e3, 1e6), ylabel="samples/s (logarithmic)")
    left.set(xlabel="--loader: how samples reach the training loop", title="1. Find the bottleneck")
    left.grid(axis="y", alpha=0.3)
    left.set_axisbelow(True)
    left.legend(fontsize=9, loc="upper right")

    seconds = seconds_to_target(fast)
    bars = right.barh(range(len(seconds)), list(seconds.values()), color="tab:green")
    first = seconds["standard"]
    labels = [f" {value:.0f} s" + (f", {first / value:.1f}x" if value != first else "") for value in seconds.values()]
    right.bar_label(bars, labels, fontsize=10)
    right.set_yticks(range(len(seconds)), list(STEPS.values()), fontsize=9)
    right.invert_yaxis()
    target = f"seconds of the whole run, to {fast['target']:.0%} accuracy"
    right.set(xlim=(0, 1.25 * first), xlabel=target, title="2. Change one thing, measure again")
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    draw(load("loaders"), load("success_rate"), FIGURE)
