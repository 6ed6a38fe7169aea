"""One training step with each --shard: what every rank stores, what the ranks send, and whether the loss is DDP's.

    torchrun --standalone --nproc-per-node 2 experiments/one_step.py

The models are built, sharded and trained by the functions of train.py: of lesson 04 for DDP, of this lesson for the
rest. You should see that each rank stores half of every weight, how many collectives one step needs with --shard
blocks, keep and root, and that the loss is the same in all cases.
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lab.flags import Parser, require_positive
from lab.tables import format_table
from sharded_models import (
    LESSON_05,
    Step,
    count_collectives,
    flags_of,
    mean_over_ranks,
    measure_on_ranks,
    own_batches,
    replicated,
    sharded,
)
from tensor_bytes import local, peak_bytes, sharded_peak_bytes, stored_tensors
from workshop.entry import run_reporting_user_errors

SHARDS = ("blocks", "keep", "root")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=256, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=4, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="images per rank (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="timed with each --shard (default: %(default)s)")
    parser.add_out("one_step.json")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width", "vit_depth", "batch_size", "steps")
    return arguments


def describe_weight(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return what this rank stores of one weight of the first block."""
    weight = LESSON_05.blocks_of(model)[0].up.weight
    facts = {"rank": rank, "type": type(weight.data).__name__, "shape": list(weight.shape)}
    if isinstance(weight, DTensor):
        facts["placements"] = str(weight.placements)
    return facts | {"local_shape": list(local(weight).shape)}


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Return the mean losses over the ranks of a step on each batch, and the collectives and bytes of a later step."""
    losses = [mean_over_ranks(step(*batch)) for batch in batches]
    optimizer.zero_grad()
    stored = stored_tensors(model, optimizer)
    collectives = count_collectives(partial(step, *batches[0]))
    optimizer.zero_grad()
    if isinstance(model, FSDPModule):
        peak = sharded_peak_bytes(lambda _: step(*batches[0]), model, optimizer)
    else:
        peak = peak_bytes(partial(step, *batches[0]), stored)
    return {
        "losses": losses,
        "collectives": collectives,
        "stored_bytes": sum(tensor.nbytes for tensor in stored),
        "peak_bytes": peak,
    }


def measure(arguments: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of DDP and of each --shard."""
    batches = own_batches(rank, arguments.batch_size, device, count=2)
    flags = flags_of(arguments.vit_width, arguments.vit_depth)
    *ddp, counter = replicated(flags, device)
    built: dict[str, Any] = {"DDP": ddp}
    built |= {f"--shard {way}": sharded([*flags, "--shard", way], rank, device, world_size) for way in SHARDS}

    stored: list[Any] = [None] * world_size
    dist.all_gather_object(stored, {way: describe_weight(model, rank) for way, (model, _, _) in built.items()})
    rows = [{"way": way} | facts_of(*parts, batches) for way, parts in built.items()]
    rows[0]["collectives"]["all-reduces"] = counter.calls

    seconds: dict[str, list[float]] = {way: [] for way in built}
    for _ in range(arguments.steps):  # alternately, so that other work on this machine slows all of them down alike
        for way, (_, _, step) in built.items():
            dist.barrier()
            started = time.perf_counter()
            step(*batches[0])
            seconds[way].append(time.perf_counter() - started)
    for row in rows:
        row["seconds"] = statistics.median(seconds[row["way"]])
        ratios = [own / ddps for own, ddps in zip(seconds[row["way"]], seconds["DDP"], strict=True)]
        row["seconds_against_ddp"] = statistics.median(ratios)
    return {"ranks": world_size, "stored": stored, "rows": rows}


def report(figures: dict[str, Any]) -> None:
    """Print the figures."""
    print("blocks[0].up.weight as each rank stores it:")
    lines = [
        [
            way,
            str(facts["rank"]),
            facts["type"],
            str(tuple(facts["shape"])),
            facts.get("placements", ""),
            str(tuple(facts["local_shape"])),
        ]
        for way in ("DDP", "--shard blocks")
        for facts in (of_rank[way] for of_rank in figures["stored"])
    ]
    print(format_table(["", "rank", "type", "shape", "placements", "stored here"], lines, left=(0, 2, 3, 4, 5)))
    print("\none training step:")
    cells = [
        [
            row["way"],
            *(str(row["collectives"][kind]) for kind in ("all-reduces", "all-gathers", "reduce-scatters")),
            f"{row['stored_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['losses'][1]:.6f}",
            f"{row['seconds_against_ddp']:.1f}x",
        ]
        for row in figures["rows"]
    ]
    header = ["", "all-reduces", "all-gathers", "reduce-scatters", "MB between steps", "MB at most", "2nd loss", "time"]
    print(format_table(header, cells))


def main() -> None:
    """Measure, print and save."""
    measure_on_ranks(parse_arguments, measure, report, "one_step.json")


if __name__ == "__main__":
    run_reporting_user_errors(main)
