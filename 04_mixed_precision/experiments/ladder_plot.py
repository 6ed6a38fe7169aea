"""The figure of the precision ladder: speed, memory and error of each rung, side by side."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plot(figures: dict[str, Any], file: Path) -> None:
    """Draw what `precision_ladder.climb` measured into a PNG: a bar for each rung, a panel for each quantity."""
    rows = [row for row in figures["rows"] if not row["note"]]
    names = [row["name"] for row in rows]
    figure = Figure(figsize=(13, 1.6 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(_message(rows), fontsize=13, fontweight="bold")
    speed, memory, error, loss = figure.subplots(1, 4, sharey=True)

    speeds = [row["samples_per_second"] for row in rows]
    texts = [f"{row['samples_per_second']:,.0f}: {row['share_of_peak']:.0%} of peak" for row in rows]
    spread = {"xerr": [row["samples_per_second_std"] for row in rows], "ecolor": "dimgray"}
    speed.barh(names, speeds, color="tab:green", alpha=0.75, **spread)
    _label(speed, speeds, texts)
    speed.set_title("samples/s")

    megabytes = [row["peak_memory_bytes"] / 1e6 for row in rows]
    memory.barh(names, megabytes, color="tab:blue", alpha=0.75)
    _label(memory, megabytes, [f"{value:,.0f}" for value in megabytes])
    memory.set_title("peak memory in MB")

    error.plot([row["output_error"] for row in rows], names, "o", color="tab:orange", label="outputs")
    gradients = [row["gradient_error"] for row in rows]
    error.plot(gradients, names, "s", color="tab:red", markerfacecolor="none", markersize=9, label="gradients")
    error.set(xscale="log", title="relative error against float64")
    error.grid(axis="x", alpha=0.3)
    error.legend(fontsize=9)

    losses = [row["val_loss"] for row in rows]
    loss.barh(names, losses, color="tab:gray", alpha=0.75)
    _label(loss, losses, [f"{value:.4f}" for value in losses])
    loss.set_title(f"validation loss after {figures['steps']} steps")
    speed.invert_yaxis()  # shared: the first row is at the top of all
    figure.savefig(file, dpi=110)


def _message(rows: list[dict[str, Any]]) -> str:
    first, best = rows[0], max(rows, key=lambda row: row["samples_per_second"])
    gain = best["samples_per_second"] / first["samples_per_second"]
    change = best["val_loss"] / first["val_loss"] - 1
    return (
        f"'{best['name']}' is {gain:.1f} times as fast as {first['name']}; its validation loss differs by {change:+.1%}"
    )


def _label(axes: Axes, values: list[float], texts: list[str]) -> None:
    """Write each bar's text into it."""
    for place, text in enumerate(texts):
        axes.text(0.02 * max(values), place - 0.22, text, va="center", fontsize=8)  # above the line of the spread
