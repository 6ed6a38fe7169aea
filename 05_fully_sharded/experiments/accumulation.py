"""Gradient accumulation with sharded weights: what is sent and what is stored, depending on two switches of FSDP2.

    torchrun --standalone --nproc-per-node 2 experiments/accumulation.py

A batch is computed whole, then in four parts, on CPUs. The peak of the memory is that of the same step on a null GPU.
You should see that --accumulate 4 of train.py, which reduces gradients after the last part only, sends fewer gradients,
but needs more memory than reducing them after each part: under FSDP2 "not yet reduced" means "not yet sharded". All
ways give the same gradient.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lab import results
from lab.flags import Parser
from lab.process_group import process_group
from mean_loss import mean_loss
from memory_model import Setup, peaks_if_possible
from sharded_models import Batch, batches_of, count_collectives, sharded, whole
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors

DEPTH = 6
"""blocks of the model"""


def backward_in_parts(
    model: FSDPModule, batch: Batch, *, parts: int, reduce_each: bool = False, keep_weights: bool = False
) -> None:
    """Compute the gradient of a batch part by part.

    Args:
        model: sharded.
        batch: inputs and targets.
        parts: number of them.
        reduce_each: reduce the gradients after each part, as FSDP2 does by itself; not only after the last.
        keep_weights: do not free the gathered weights between the parts.
    """
    inputs, targets = batch
    pairs = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for number, (part, part_targets) in enumerate(pairs, start=1):
        last = number == parts
        model.set_requires_gradient_sync(reduce_each or last)
        model.set_reshard_after_backward(last or not keep_weights)
        loss = mean_loss(model(part).float(), part_targets) * (len(part) / len(inputs))
        loss.backward()


def main() -> None:
    """Measure on all ranks; rank 0 stores the table."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_argument("--sequence_length", type=int, default=64, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="parts of the batch (default: %(default)s)")
    arguments = parser.parse_args()
    require_positive(arguments, "width", "sequence_length", "batch_size", "accumulate")
    parts = arguments.accumulate
    if parts > arguments.batch_size:
        raise UserError(f"--batch_size {arguments.batch_size} has no {parts} parts")
    ways: dict[str, dict[str, Any]] = {
        "whole batch": {"parts": 1},
        f"{parts} parts, reduce after each": {"parts": parts, "reduce_each": True},
        f"{parts} parts, reduce after the last": {"parts": parts},
        f"{parts} parts, and keep the weights gathered": {"parts": parts, "keep_weights": True},
    }
    torch.set_num_threads(1)
    with process_group(on_cpu=True) as (rank, world_size, _):
        (batch,) = batches_of(rank, arguments.batch_size, arguments.sequence_length)
        model, optimizer, _ = sharded(rank, world_size, width=arguments.width, depth=DEPTH)
        counted: list[list[results.Cell]] = []
        first: torch.Tensor | None = None
        for way in ways.values():
            optimizer.zero_grad()
            counts = count_collectives(partial(backward_in_parts, model, batch, **way))
            gradient = whole(weight.grad for weight in model.parameters())
            difference = None if first is None else ((gradient - first).norm() / first.norm()).item()
            first = gradient if first is None else first
            counted.append([counts["all-gathers"], counts["reduce-scatters"], difference])
        if rank == 0:
            same: dict[str, Any] = {
                "model": "gpt_tiny",
                "depth": DEPTH,
                "width": arguments.width,
                "sequence_length": arguments.sequence_length,
                "batch_size": arguments.batch_size,
                "ranks": world_size,
                "way": "blocks",
            }
            peaks = peaks_if_possible(*(Setup(**same, **way) for way in ways.values()))
            rows = [
                [name, gathers, reductions, peak, difference]
                for name, (gathers, reductions, difference), peak in zip(ways, counted, peaks, strict=True)
            ]
            megabytes = 4 * sum(weight.numel() for weight in model.parameters()) / 1e6
            results.store(
                "accumulation",
                title="Gradient accumulation",
                columns=["", "all-gathers", "reduce-scatters", "MB at most", "relative difference of the gradient"],
                rows=rows,
                formats={"MB at most": ",.1f", "relative difference of the gradient": ".0e"},
                spread=f"the gradients of the whole model, not sharded, are {megabytes:.1f} MB",
            )


if __name__ == "__main__":
    run_reporting_user_errors(main)
