"""The figure of gradient underflow: where the gradients lie, and what fp16 can hold of them."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from gradients import Format

START_SCALE = 16
"""power of two that `torch.amp.GradScaler` begins with"""


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw a histogram of the gradients' exponents, as they are and scaled, over what fp16 makes of each."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    smallest, normal, largest = -25, -14, 16  # powers of two: to zero below, fewer digits below, overflow from here on
    assert Format(torch.float16).smallest / 2 == 2.0**smallest
    exponents, shares = record["exponents"], [100 * share for share in record["histogram"]]
    axes.axvspan(exponents[0], smallest, color="tab:red", alpha=0.18, label="fp16: becomes 0")
    axes.axvspan(smallest, normal, color="tab:orange", alpha=0.18, label="fp16: loses digits")
    axes.axvspan(largest, exponents[-1] + START_SCALE, color="tab:purple", alpha=0.18, label="fp16: overflows")
    axes.stairs(shares, [*exponents, exponents[-1] + 1], fill=True, color="tab:blue", alpha=0.8, label="gradients")
    scaled = [exponent + START_SCALE for exponent in [*exponents, exponents[-1] + 1]]
    axes.stairs(shares, scaled, color="black", linewidth=1.5, label=f"gradients times $2^{{{START_SCALE}}}$")
    axes.set(xlabel="magnitude of a gradient", ylabel="% of the gradients")
    axes.set_xlim(exponents[0], exponents[-1] + START_SCALE)
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    before, after = (next(r for r in record["rows"] if r["scale"] == 2.0**power) for power in (0, START_SCALE))
    axes.set_title(
        f"In fp16 {before['zero']:.1%} of the gradients become 0; {after['zero']:.1%} with the loss scaled",
        fontweight="bold",
    )
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=110)
