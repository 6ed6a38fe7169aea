"""Gradient underflow: why fp16 needs its loss scaled, and bf16 does not.

    python underflow.py --quick true      # seconds
    python underflow.py                   # the 3D U-Net: a small one on a CPU, the full one on a GPU

You should see gradients below what fp16 can hold, which would be zero: some of the small U-Net's, most of the full
one's. Multiplying the loss multiplies all gradients and moves them up; one can also go too far. Then short trainings
show what it means for the loss.
The gradients are collected in workshop/experiments/underflow.py.
"""

import dataclasses
import math

import torch
from torch import nn

from gradients import (
    EXPONENTS,
    collect_gradients,
    histogram,
    lost_weight_gradients,
    scaled_shares,
)
from rungs import Rung, batches_of
from underflow_plot import plot
from workload import WorkloadConfig, read_workload, training_device
from workshop.distributed.ranks import Ranks
from workshop.errors import run_reporting_user_errors
from workshop.loaders import build_loaders
from workshop.measuring.flags import default_folder, make_output_folder
from workshop.measuring.records import write_record
from workshop.measuring.tables import format_table
from workshop.models import build_model

SCALES = [2.0**power for power in (-8, 0, 4, 8, 12, 16, 20, 24, 28, 32)]
"""2^16 is what GradScaler begins with"""
TRAININGS = {"fp32": 1.0, "fp16, loss times 2^-8": 2.0**-8, "fp16, not scaled": 1.0, "fp16, scaled": None}
"""what the loss is multiplied by, and the gradients divided by again; None: GradScaler finds out

The tiny U-Net's loss is a mean over 2^8 times fewer values than the full one's: times 2^-8, its gradients are as small.
"""


def val_losses(config: WorkloadConfig, device: torch.device, model: nn.Module) -> dict[str, float]:
    """Train a copy of ``model`` for ``config.steps`` steps in each way; return the validation losses."""
    train_loader, val_loader = build_loaders(config, Ranks(device=device))
    losses = {}
    for name, scale in TRAININGS.items():
        rung = Rung(dataclasses.replace(config, precision=name.partition(",")[0]), model, train_loader, device)
        if scale:
            rung.scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=2**31 - 1)
        rung.train(batches_of(train_loader, config.steps))
        losses[name] = rung.validate(val_loader)
    return losses


def main() -> None:
    """Collect the gradients of one batch, scale them, train; print, record and draw what was found."""
    device = training_device()
    config = read_workload(WorkloadConfig, device, __doc__, steps=10)
    folder = config.out or default_folder()
    make_output_folder(folder)
    train_loader, _ = build_loaders(config, Ranks(device=device))
    torch.manual_seed(config.seed)
    model = build_model(config).to(device)
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
    write_record(json_file, device, figures)
    plot(figures, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
