"""Gradient accumulation with sharded weights: what is sent and what is stored, depending on two switches of FSDP2.

    torchrun --standalone --nproc-per-node 2 experiments/accumulation.py

A batch is computed whole, then in four parts, on CPUs. You should see that --accumulate 4 of train.py, which reduces
gradients after the last part only, sends fewer gradients, but needs more memory than reducing them after each part:
under FSDP2 "not yet reduced" means "not yet sharded". All ways give the same gradient.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule

from lab import results
from lab.flags import Parser
from lab.process_group import process_group
from sharded_models import LESSON, Batch, batches_of, count_collectives, sharded, whole
from tensor_bytes import sharded_peak_bytes
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors


def backward_in_parts(
    model: FSDPModule,
    batch: Batch,
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
    pairs = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for number, (part, part_targets) in enumerate(pairs, start=1):
        last = number == parts
        model.set_requires_gradient_sync(reduce_each or last)
        model.set_reshard_after_backward(last or not keep_weights)
        loss = LESSON.loss_function(model(part).float(), part_targets) * (len(part) / len(inputs))
        loss.backward()
        if not last:
            between()


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
    ways = {
        "whole batch": partial(backward_in_parts, parts=1),
        f"{parts} parts, reduce after each": partial(backward_in_parts, parts=parts, reduce_each=True),
        f"{parts} parts, reduce after the last": partial(backward_in_parts, parts=parts),
        f"{parts} parts, and keep the weights gathered": partial(backward_in_parts, parts=parts, keep_weights=True),
    }
    torch.set_num_threads(1)
    with process_group(on_cpu=True) as (rank, world_size, _):
        (batch,) = batches_of(rank, arguments.batch_size, arguments.sequence_length)
        model, optimizer, step = sharded(rank, world_size, width=arguments.width, depth=6, lr=1e-30)
        step(*batch)  # makes the optimizer's state; the learning rate is too small to change a weight
        rows: list[list[results.Cell]] = []
        first: torch.Tensor | None = None
        for name, backward in ways.items():
            optimizer.zero_grad()
            counts = count_collectives(partial(backward, model, batch))
            gradient = whole(weight.grad for weight in model.parameters())
            difference = None if first is None else ((gradient - first).norm() / first.norm()).item()
            first = gradient if first is None else first
            optimizer.zero_grad()
            peak = sharded_peak_bytes(partial(backward, model, batch), model, optimizer)
            rows.append([name, counts["all-gathers"], counts["reduce-scatters"], peak / 1e6, difference])
        if rank == 0:
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
