"""Gradient underflow: why fp16 needs its loss scaled, and bf16 does not.

    python experiments/underflow.py --quick true      # seconds
    python experiments/underflow.py                   # the 3D U-Net: a small one on a CPU, the full one on a GPU

You should see gradients below what fp16 can hold, which would become zero: some of the small U-Net's, most of the full
one's. Multiplying the loss multiplies all gradients and moves them up; one can also go too far. Then short trainings
show what it means for the loss.
The gradients are collected in gradients.py.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from gradients import (
    EXPONENTS,
    Format,
    collect_gradients,
    histogram,
    lost_weight_gradients,
    scaled_shares,
)
from lab.flags import default_folder, make_output_folder
from lab.results import write_results
from lab.tables import format_table
from trainer import Trainer, batches_of
from workload import LESSON, WorkloadConfig, make_loaders, read_workload, training_device
from workshop.entry import run_reporting_user_errors

SCALES = [2.0**power for power in (-8, 0, 4, 8, 12, 16, 20, 24, 28, 32)]
"""2^16 is what GradScaler begins with"""
TRAININGS = {"fp32": 1.0, "fp16, loss times 2^-8": 2.0**-8, "fp16, not scaled": 1.0, "fp16, scaled": None}
"""what the loss is multiplied by, and the gradients divided by again; None: GradScaler finds out

The tiny U-Net's loss is a mean over 2^8 times fewer values than the full one's: times 2^-8, its gradients are as small.
"""

START_SCALE = 16
"""power of two that `torch.amp.GradScaler` begins with"""


def val_losses(config: WorkloadConfig, device: torch.device, model: nn.Module) -> dict[str, float]:
    """Train a copy of ``model`` for ``config.steps`` steps in each way; return the validation losses."""
    train_loader, val_loader = make_loaders(config, device)
    losses = {}
    for name, scale in TRAININGS.items():
        options = dataclasses.replace(config, precision=name.partition(",")[0])
        trainer = Trainer(options, model, device, scale)
        trainer.train(batches_of(train_loader, config.steps))
        losses[name] = trainer.validate(val_loader)
    return losses


def shown(exponents: list[int], histogram: list[float]) -> tuple[int, int]:
    """Return the exponents at which the plot begins and ends: with nearly all gradients, scaled and not, between them.

    What becomes 0 in fp16, below 2^-25, and what overflows, from 2^16 on, can always be seen.
    """
    below = itertools.accumulate(histogram)
    smallest = next(exponent for exponent, share in zip(exponents, below, strict=True) if share > 1e-4)
    largest = max(exponent for exponent, share in zip(exponents, histogram, strict=True) if share)
    return min(smallest - 1, -32), max(largest + START_SCALE + 1, 20)


def plot(results: dict[str, Any], file: Path) -> None:
    """Plot a histogram of the gradients' exponents, unscaled and scaled, over what becomes of them in fp16."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    smallest, normal, largest = -25, -14, 16  # powers of two: to zero below, fewer digits below, overflow from here on
    assert Format(torch.float16).smallest / 2 == 2.0**smallest
    exponents, shares = results["exponents"], [100 * share for share in results["histogram"]]
    begin, end = shown(exponents, results["histogram"])
    axes.axvspan(begin, smallest, color="tab:red", alpha=0.18, label="fp16: becomes 0")
    axes.axvspan(smallest, normal, color="tab:orange", alpha=0.18, label="fp16: loses digits")
    axes.axvspan(largest, end, color="tab:purple", alpha=0.18, label="fp16: overflows")
    axes.stairs(shares, [*exponents, exponents[-1] + 1], fill=True, color="tab:blue", alpha=0.8, label="gradients")
    scaled = [exponent + START_SCALE for exponent in [*exponents, exponents[-1] + 1]]
    axes.stairs(shares, scaled, color="black", linewidth=1.5, label=f"gradients times $2^{{{START_SCALE}}}$")
    axes.set(xlabel="magnitude of a gradient", ylabel="% of the gradients")
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    before, after = (next(r for r in results["rows"] if r["scale"] == 2.0**power) for power in (0, START_SCALE))
    axes.set_title(
        f"In fp16 {before['zero']:.1%} of the gradients become 0; {after['zero']:.1%} with the loss scaled",
        fontweight="bold",
    )
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Collect the gradients of one batch, scale them, train; print, save and plot what was found."""
    device = training_device()
    LESSON.set_precision("fp32", cudnn_benchmark=False)  # otherwise convolutions would round to TF32
    config = read_workload(WorkloadConfig, device, __doc__, steps=10)
    folder = config.out or default_folder()
    make_output_folder(folder)
    train_loader, _ = make_loaders(config, device)
    torch.manual_seed(config.seed)
    model = LESSON.make_model(config).to(device)
    batch = tuple(part.to(device) for part in next(batches_of(train_loader, 1)))

    magnitudes = collect_gradients(model, *batch)
    rows = scaled_shares(magnitudes, SCALES)
    print(
        f"{config.model} on {config.dataset}, a batch of {config.batch_size}: {len(magnitudes):,} gradients above 0\n"
    )
    names = ["zero", "coarse", "overflow"]
    lines = [
        [row["format"], f"2^{math.log2(row['scale']):.0f}", *(f"{row[name]:.1%}" for name in names)] for row in rows
    ]
    print(format_table(["format", "loss times", "become 0", "lose digits", "overflow"], lines))

    lost = {
        "fp16, not scaled": lost_weight_gradients(model, batch, torch.float16, scaled=False),
        "fp16, scaled": lost_weight_gradients(model, batch, torch.float16, scaled=True),
        "bf16": lost_weight_gradients(model, batch, torch.bfloat16, scaled=False),
    }
    print("\nweights whose gradient is 0: " + "; ".join(f"{name}: {share:.1%}" for name, share in lost.items()))
    losses = val_losses(config, device, model)
    print(f"validation loss after {config.steps} steps: " + "; ".join(f"{n}: {loss:.4f}" for n, loss in losses.items()))

    figures = {
        "config": dataclasses.asdict(config),
        "gradients": len(magnitudes),
        "exponents": list(EXPONENTS),
        "histogram": histogram(magnitudes),
        "rows": rows,
        "lost_weight_gradients": lost,
        "steps": config.steps,
        "val_losses": losses,
    }
    json_file, plot_file = folder / "underflow.json", folder / "underflow.png"
    write_results(json_file, device, figures)
    plot(figures, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
