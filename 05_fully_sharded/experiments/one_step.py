"""One training step with each --shard: what every rank stores, what the ranks send, and whether the loss is DDP's.

    torchrun --standalone --nproc-per-node 2 experiments/one_step.py

The model is built, sharded and trained by the functions of train.py, on CPUs and on random bytes; for DDP, the same
model is wrapped in DistributedDataParallel. The peak of the memory is that of the same step on a null GPU. You should
see that each rank stores half of every weight, how many collectives one step needs with --shard blocks, keep and root,
and that the loss is the same in all cases.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lab import results
from lab.flags import Parser
from lab.process_group import mean_over_ranks, process_group
from memory_model import Setup, peaks_if_possible
from sharded_models import Batch, Step, batches_of, count_collectives, replicated, sharded
from tensor_bytes import local, stored_tensors
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors
from workshop.profiling.all_reduce_counter import AllReduceCounter

COLLECTIVES = ("all-reduces", "all-gathers", "reduce-scatters")


def describe_weight(model: nn.Module, name: str, rank: int) -> list[results.Cell]:
    """Return what this rank stores of one weight of the first block, as a row of the table."""
    weight = model.blocks[0].qkv.weight
    placements = f"`{weight.placements}`" if isinstance(weight, DTensor) else None
    shapes = [f"`{tuple(shape)}`" for shape in (weight.shape, local(weight).shape)]
    return [name, rank, f"`{type(weight.data).__name__}`", shapes[0], placements, shapes[1]]


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, batches: list[Batch]) -> dict[str, Any]:
    """Return the collectives of a step, the bytes of this rank, and the loss of the second step over all ranks."""
    losses = [mean_over_ranks(step(*batch)) for batch in batches]
    stored = sum(tensor.nbytes for tensor in stored_tensors(model, optimizer))
    return {"collectives": count_collectives(partial(step, *batches[0])), "stored": stored, "loss": losses[1]}


def main() -> None:
    """Measure on all ranks; rank 0 stores the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=256, help="as in train.py (default: %(default)s)")
    parser.add_argument("--sequence_length", type=int, default=32, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=4, help="samples per rank (default: %(default)s)")
    arguments = parser.parse_args()
    require_positive(arguments, "width", "sequence_length", "batch_size")
    torch.set_num_threads(1)
    with process_group(on_cpu=True) as (rank, world_size, _):
        batches = batches_of(rank, arguments.batch_size, arguments.sequence_length, count=2)
        ddp_model, optimizer, step = replicated(width=arguments.width)
        counter = AllReduceCounter(ddp_model)
        built: dict[str, tuple[nn.Module, torch.optim.Optimizer, Step]] = {"DDP": (ddp_model.module, optimizer, step)}
        for way in ("blocks", "keep", "root"):
            built[f"--shard {way}"] = sharded(rank, world_size, width=arguments.width, shard=way)
        shown = [describe_weight(built[name][0], name, rank) for name in ("DDP", "--shard blocks")]
        of_ranks: list[Any] = [None] * world_size
        dist.all_gather_object(of_ranks, shown)
        measured = {name: measure(*parts, batches) for name, parts in built.items()}
        measured["DDP"]["collectives"]["all-reduces"] = counter.calls
        measured["DDP"]["stored"] += counter.bytes  # the buckets, from which DDP sends gradients, are kept
        if rank == 0:
            same = {
                "model": "gpt_tiny",
                "width": arguments.width,
                "sequence_length": arguments.sequence_length,
                "batch_size": arguments.batch_size,
                "ranks": world_size,
            }
            peaks = peaks_if_possible(*(Setup(**same, way=way) for way in ("ddp", "blocks", "keep", "root")))
            results.store(
                "stored_weight",
                title="What each rank stores of blocks[0].qkv.weight",
                columns=["", "rank", "type", "shape", "placements", "stored on this rank"],
                rows=[row for rows_of_way in zip(*of_ranks, strict=True) for row in rows_of_way],
            )
            results.store(
                "one_step",
                title="One training step",
                columns=["", *COLLECTIVES, "MB between steps", "MB at most", "loss of step 2"],
                rows=[
                    [
                        f"`{name}`" if "--" in name else name,
                        *(found["collectives"][kind] for kind in COLLECTIVES),
                        found["stored"] / 1e6,
                        peak,
                        found["loss"],
                    ]
                    for (name, found), peak in zip(measured.items(), peaks, strict=True)
                ],
                formats={"MB between steps": ",.1f", "MB at most": ",.1f", "loss of step 2": ",.6f"},
            )


if __name__ == "__main__":
    run_reporting_user_errors(main)
