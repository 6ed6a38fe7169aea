"""The weights of one block are gathered at a time, by one all-gather; `--shard` still decides when they are freed."""

from collections.abc import Iterator

from clinic.observe import Script
from clinic.sharded import Notes, note_steps

DEPTH = 5
"""blocks of the model, unlike the lesson's default of four"""
FLAGS = ("--optimizer", "sgd", "--batch_size", 8, "--vit_width", 32, "--vit_depth", DEPTH)
PADDED = 1.1
"""a weight is filled up to a multiple of the ranks before it is sent, so a gather has some more numbers than weights"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    seen = {shard: gathered(script, shard) for shard in ("blocks", "keep", "root")}
    for shard in ("blocks", "keep"):
        notes, step = seen[shard], seen[shard].steps[0]
        largest = max((sent.numel for sent in step.gathers), default=0)
        if largest > PADDED * max(notes.blocks.values()):
            share = largest / max(notes.blocks.values())
            yield f"with --shard {shard}, one all-gather collects {share:.1f} times as many weights as a block has"
        elif len(step.forward_gathers) > DEPTH + 1:
            parts = f"{DEPTH} blocks and the rest of the model"
            yield f"with --shard {shard}, the forward pass needs {len(step.forward_gathers)} all-gathers for {parts}"
        elif len(step.forward_gathers) < DEPTH + 1:
            yield f"with --shard {shard}, the forward pass has only {len(step.forward_gathers)} all-gathers"
        elif len(step.reductions) != DEPTH + 1:
            yield f"with --shard {shard}, the gradients are sent in {len(step.reductions)} pieces, not in {DEPTH + 1}"
        elif (kept := step.gathered_at_once / notes.weights) > 0.5 and shard == "blocks":
            yield f"with --shard blocks, {kept:.0%} of all weights are still gathered when the forward pass has ended"
        elif kept < 0.9 and shard == "keep":
            yield f"with --shard keep, {1 - kept:.0%} of the weights were freed between forward and backward"
    again = gathered(script, "blocks", "--activation_checkpointing", "true").steps[0]
    if not again.flops > 1.2 * seen["blocks"].steps[0].flops:
        yield "with --activation_checkpointing true, the blocks are not computed again in the backward pass"
    step = seen["root"].steps[0]
    if len(step.gathers) != 1:
        yield f"with --shard root, a step needs {len(step.gathers)} all-gathers; one must collect all weights"
    losses = [notes.steps[0].losses[0] for notes in seen.values()]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        yield "the first loss depends on --shard, which must only decide what is in memory at the same time"


def gathered(script: Script, shard: str, *flags: str) -> Notes:
    """Return what rank 0 does in one step."""
    run = script.run(*FLAGS, "--shard", shard, *flags, ranks=2, train=16, val=8, notes=False, watch=note_steps)
    return run[0].extra
