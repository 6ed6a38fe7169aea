"""With activation checkpointing little is kept for backward, each block is computed once more, and gradients stay."""

from collections.abc import Iterator

import torch

from clinic.observe import Script
from clinic.sharded import Step, note_steps

WIDTH, DEPTH, PATCHES = 32, 6, 16
FLAGS = ("--optimizer", "sgd", "--batch_size", 32, "--vit_width", WIDTH, "--vit_depth", DEPTH)
KEPT = 0.2
"""of what is kept without checkpointing; the inputs of the blocks, and what is in no block, are 0.08 of it"""
PEAK = 0.5
"""of that without checkpointing; one block at a time needs 0.3 of it"""
ONCE_MORE = 1.4
"""times the operations without checkpointing; one more forward pass of the blocks makes it 1.32, or 1.22 with
use_reentrant=False, where PyTorch ends this pass when it has all that backward needs"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    off, on = (first_step(script, checkpointing) for checkpointing in ("false", "true"))
    inputs = off.samples * PATCHES * WIDTH * 4 * DEPTH  # bytes of what all blocks are given
    if off.kept < 3 * inputs:
        yield "without --activation_checkpointing, the blocks are computed twice too, and little is stored"
    elif on.kept > KEPT * off.kept:
        share = f"{on.kept / off.kept:.0%} of what it stores without"
        yield f"with --activation_checkpointing true, the forward pass stores {share}"
    elif on.peak > PEAK * off.peak:
        yield (
            "with --activation_checkpointing true, the forward pass stores little, but forward and backward together "
            f"have at one moment {on.peak / off.peak:.0%} as much in memory as without"
        )
    if on.flops > ONCE_MORE * off.flops:
        yield f"with --activation_checkpointing true, {on.flops / off.flops:.2f} times as much is computed as without"
    different = [
        name
        for name, gradient in off.gradients.items()
        if name not in on.gradients or not torch.allclose(on.gradients[name], gradient, rtol=1e-3, atol=1e-6)
    ]
    if different:
        yield f"{len(different)} of {len(off.gradients)} gradients change with the flag: {different[0]} is one of them"


def first_step(script: Script, checkpointing: str) -> Step:
    """Return what rank 0 does in the first step."""
    flags = (*FLAGS, "--activation_checkpointing", checkpointing)
    return script.run(*flags, ranks=2, train=64, val=8, notes=False, watch=note_steps)[0].extra.steps[0]
