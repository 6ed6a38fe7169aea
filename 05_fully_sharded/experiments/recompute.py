"""Activation checkpointing: how much less is kept for backward, and how much more is computed?

    python experiments/recompute.py

One process trains a vision transformer, first as usual, then with torch.utils.checkpoint around each block, around
every second block, and around each layer of each block. You should see that checkpointing each block keeps a small part
of the bytes, for about a quarter more operations. Around each layer it saves nothing: backward needs the input of each
layer anyway, and the inputs of the layers are what a checkpoint keeps.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import load_script
from lab.results import write_results
from lab.tables import format_table
from tensor_bytes import bytes_kept_for_backward, peak_bytes, stored_tensors
from workshop.entry import run_reporting_user_errors
from workshop.models.vit import build_vit
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "05_fully_sharded")
WAYS = ("no checkpointing", "each block", "every second block", "each layer of each block")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=8, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_patch", type=int, default=2, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="images in the batch (default: %(default)s)")
    parser.add_out("recompute.json")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width", "vit_depth", "vit_patch", "batch_size")
    return arguments


def wrap(module: nn.Module) -> None:
    """Have a module keep only its inputs for backward, by the call that train.py makes for each block."""
    module.forward = LESSON.recomputed(module.forward)  # type: ignore[method-assign]


def checkpointed(model: nn.Module, way: str) -> nn.Module:
    """Return the model with checkpoints in one of the `WAYS`."""
    blocks = LESSON.blocks_of(model)
    chosen = {"no checkpointing": [], "each block": blocks, "every second block": blocks[::2]}
    chosen["each layer of each block"] = [layer for block in blocks for layer in block.children()]
    for module in chosen[way]:
        wrap(module)
    return model


def measure(arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """Return what a training step keeps, needs at most, and computes, with checkpoints in one of the `WAYS`."""
    torch.manual_seed(0)
    model = build_vit("mnist", 64, arguments.vit_patch, arguments.vit_width, arguments.vit_depth)
    model = checkpointed(model, way)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(arguments.batch_size, 1, 28, 28)
    labels = torch.arange(arguments.batch_size) % 10

    def forward() -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the optimizer's state
    kept = bytes_kept_for_backward(model, forward)
    with FlopCounterMode(display=False) as counter:
        loss = forward()
        loss.backward()
    gradient = torch.cat([weights.grad.flatten() for weights in model.parameters() if weights.grad is not None])
    optimizer.zero_grad()
    peak = peak_bytes(step, stored_tensors(model, optimizer))
    return {
        "way": way,
        "kept_bytes": kept,
        "peak_bytes": peak,
        "flops": counter.get_total_flops(),
        "gradient_norm": gradient.norm().item(),
    }


def main() -> None:
    """Measure each way; print and save the figures."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    torch.set_num_threads(1)
    rows = [measure(arguments, way) for way in WAYS]
    plain = rows[0]
    cells = [
        [
            row["way"],
            f"{row['kept_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['flops'] / plain['flops'] - 1:+.1%}",
        ]
        for row in rows
    ]
    print(format_table(["checkpoint around", "MB kept for backward", "peak MB", "GFLOP", "more"], cells))
    config = {name: value for name, value in vars(arguments).items() if name != "out"}
    write_results(arguments.out / "recompute.json", torch.device("cpu"), {"config": config, "rows": rows})


if __name__ == "__main__":
    run_reporting_user_errors(main)
