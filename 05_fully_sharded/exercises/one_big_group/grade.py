"""The weights of one block are gathered at a time, by one all-gather; `--shard` still decides when they are freed."""

from collections.abc import Iterator

from clinic.coded import SEQUENCE_LENGTH
from clinic.observe import Operation, Rank
from clinic.runs import Script, difference

DEPTH = 5
"""blocks of the model, unlike the lesson's default of four"""
FLAGS = ("--optimizer", "sgd", "--batch_size", 8, "--width", 64, "--depth", DEPTH, "--sequence_length", SEQUENCE_LENGTH)
PADDED = 1.1
"""a weight is filled up to a multiple of the ranks before it is sent, so a gather has some more numbers than weights"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    seen = {shard: step(script, shard) for shard in ("blocks", "keep")}
    seen["root"] = step(script, "root", "--activation_checkpointing", "true")
    for shard in ("blocks", "keep"):
        rank = seen[shard]
        all_gathers, reductions = operations(rank, "allgather"), operations(rank, "reducescatter")
        forward = [op for op in all_gathers if op.forward]
        block, weights = max(rank.blocks.values()), sum(gradient.numel() for gradient in rank.updates[0].gradients) * 2
        kept = rank.training[0].unsharded / weights
        if (largest := max((op.numel for op in all_gathers), default=0)) > PADDED * block:
            yield f"with --shard {shard}, one all-gather collects {largest / block:.1f} times the weights of a block"
        elif len(forward) != DEPTH + 1:
            parts = f"{DEPTH} blocks and the rest of the model"
            yield f"with --shard {shard}, the forward pass has {len(forward)} all-gathers for {parts}"
        elif len(reductions) != DEPTH + 1:
            yield f"with --shard {shard}, the gradients are sent in {len(reductions)} pieces, not in {DEPTH + 1}"
        elif kept > 0.5 and shard == "blocks":
            yield f"with --shard blocks, {kept:.0%} of all weights are still gathered when the forward pass has ended"
        elif kept < 0.9 and shard == "keep":
            yield f"with --shard keep, {1 - kept:.0%} of the weights were freed between forward and backward"
    if not len(operations(seen["root"], "product")) > 1.15 * len(operations(seen["blocks"], "product")):
        yield "with --activation_checkpointing true, the blocks are not computed again in the backward pass"
    if (gathers := len(operations(seen["root"], "allgather"))) != 1:
        yield f"with --shard root, a step needs {gathers} all-gathers; one must collect all weights"
    first, *others = (rank.training[0].outputs for rank in seen.values())
    if any(difference(other, first) > 1e-4 for other in others):
        yield "what the model computes depends on --shard, which must only decide what is in memory at the same time"


def operations(rank: Rank, name: str) -> list[Operation]:
    """Return the operations of the first step; a collective of a single number is none of the model."""
    return [op for op in rank.operations if op.name == name and op.updates == 0 and op.numel > 8]


def step(script: Script, shard: str, *flags: str) -> Rank:
    """Return what rank 0 does in one step."""
    run = script.run(*FLAGS, "--shard", shard, *flags, ranks=2, train=16, val=8, keep=True, operations=True)
    return run[0]
