"""Gradient accumulation with sharded weights: what is sent and what is stored, depending on two switches of FSDP2.

    torchrun --standalone --nproc-per-node 2 experiments/accumulation.py

A batch is computed whole, then in four parts. You should see that --accumulate 4 of train.py, which reduces gradients
after the last part only, sends fewer gradients, but needs more memory than reducing them after each part: under FSDP
"not yet reduced" means "not yet sharded". All ways give the same gradient.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lab.flags import Parser, require_positive
from lab.tables import format_table
from sharded_models import (
    LESSON_05,
    count_collectives,
    flags_of,
    measure_on_ranks,
    own_batches,
    sharded,
    whole,
)
from tensor_bytes import sharded_peak_bytes
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `UserError` if a batch has fewer images than parts."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=6, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_patch", type=int, default=4, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="parts of the batch (default: %(default)s)")
    parser.add_out("accumulation.json")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width", "vit_depth", "vit_patch", "batch_size", "accumulate")
    if arguments.accumulate > arguments.batch_size:
        raise UserError(f"--batch_size {arguments.batch_size} has no {arguments.accumulate} parts")
    return arguments


def backward_in_parts(
    model: FSDPModule,
    batch: tuple[torch.Tensor, torch.Tensor],
    between: Callable[[], None] = lambda: None,
    *,
    parts: int,
    reduce_each: bool = False,
    keep_weights: bool = False,
) -> None:
    """Compute the gradient of a batch part by part.

    Args:
        model: sharded.
        batch: inputs and targets.
        between: is called after each backward pass but the last.
        parts: number of them.
        reduce_each: reduce the gradients after each part, as FSDP2 does by itself; not only after the last.
        keep_weights: do not free the gathered weights between the parts.
    """
    inputs, targets = batch
    # As train.py does. `chunk` can make fewer parts: of 9 samples, three in place of four.
    pairs = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for number, (part, part_targets) in enumerate(pairs, start=1):
        last = number == parts
        model.set_requires_gradient_sync(reduce_each or last)
        model.set_reshard_after_backward(last or not keep_weights)
        loss = LESSON_05.loss_function(model(part), part_targets) * (len(part) / len(inputs))
        loss.backward()
        if not last:
            between()


def ways(parts: int) -> dict[str, Callable[..., None]]:
    """Return the ways to compute the gradient of a batch, by what the tables call them."""
    return {
        "whole batch": partial(backward_in_parts, parts=1),
        f"{parts} parts, reduce after each": partial(backward_in_parts, parts=parts, reduce_each=True),
        f"{parts} parts, reduce after the last": partial(backward_in_parts, parts=parts),
        f"{parts} parts, and keep the weights gathered": partial(backward_in_parts, parts=parts, keep_weights=True),
    }


def measure(arguments: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return collectives, bytes and the difference of the gradient for each way."""
    ((images, labels),) = own_batches(rank, arguments.batch_size, device, count=1)
    flags = flags_of(arguments.vit_width, arguments.vit_depth, "--vit_patch", arguments.vit_patch, "--lr", 1e-30)
    model, optimizer, step = sharded(flags, rank, device, world_size)
    step(images, labels)  # makes the optimizer's state; the learning rate is too small to change a weight
    rows: list[dict[str, Any]] = []
    first: torch.Tensor | None = None
    for name, backward in ways(arguments.accumulate).items():
        optimizer.zero_grad()
        collectives = count_collectives(partial(backward, model, (images, labels)))
        gradient = whole(weights.grad for weights in model.parameters())
        first = gradient if first is None else first
        difference = ((gradient - first).norm() / first.norm()).item()
        optimizer.zero_grad()
        peak = sharded_peak_bytes(partial(backward, model, (images, labels)), model, optimizer)
        rows.append({"way": name, "collectives": collectives, "peak_bytes": peak, "gradient_difference": difference})
    gradient_bytes = 4 * sum(weights.numel() for weights in model.parameters())
    return {"ranks": world_size, "gradient_bytes": gradient_bytes, "rows": rows}


def report(figures: dict[str, Any]) -> None:
    """Print the figures."""
    cells = [
        [
            row["way"],
            *(str(row["collectives"][kind]) for kind in ("all-gathers", "reduce-scatters")),
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['gradient_difference']:.0e}",
        ]
        for row in figures["rows"]
    ]
    header = ["", "all-gathers", "reduce-scatters", "MB at most", "gradient differs by"]
    print(format_table(header, cells))
    print(f"all gradients of the model, not sharded: {figures['gradient_bytes'] / 1e6:.1f} MB")


def main() -> None:
    """Measure, print and save."""
    measure_on_ranks(parse_arguments, measure, report, "accumulation.json")


if __name__ == "__main__":
    run_reporting_user_errors(main)
