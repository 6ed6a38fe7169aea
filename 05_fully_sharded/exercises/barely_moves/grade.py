"""In bf16 every weight follows a small learning rate, while the model is computed and sent in bf16."""

from collections.abc import Iterator

import torch

from clinic.coded import SEQUENCE_LENGTH
from clinic.observe import Rank
from clinic.runs import Fault, Script

LR = 1e-5
FLAGS = (
    *("--optimizer", "adam", "--lr", LR, "--warmup", 0, "--batch_size", 16),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)
NOT_ZERO = 1e-6
"""gradients below are left out: Adam divides by their size, to which it adds 1e-8"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    rank = step(script, "bf16")
    before, after = rank.training[0].weights, list(rank.weights.values())
    moved = torch.cat([(new.double() - old.double()).flatten() for new, old in zip(after, before, strict=True)])
    moved = moved[rank.updates[0].gradient.abs() > NOT_ZERO].abs()
    share = (moved > 0).double().mean().item() if len(moved) else 0.0
    if share < 0.99:
        yield f"in bf16 with --lr {LR:g}, the first update changes {share:.0%} of the weights that have a gradient"
    elif not 0.9 * LR < moved.median() < 1.1 * LR:
        yield f"in bf16, Adam's first update with --lr {LR:g} changes a weight by {moved.median():.1e}"
    if (computed := dtypes(rank, "product")) != {torch.bfloat16}:
        yield f"with --precision bf16, matrix products are computed in {names(computed)}"
    if (sent := dtypes(rank, "allgather")) != {torch.bfloat16}:
        yield f"with --precision bf16, the weights are sent in {names(sent)}"
    try:
        for precision, found in (("bf16", rank), ("fp16", step(script, "fp16"))):
            if wrong := found.state_dtypes - {torch.float32, torch.float64}:
                yield f"with --precision {precision}, the running means of the optimizer are stored in {names(wrong)}"
    except Fault as fault:
        yield f"with --precision fp16, {fault}"
    if (computed := dtypes(step(script, "fp32"), "product")) != {torch.float32}:
        yield f"with --precision fp32, matrix products are computed in {names(computed)}"


def step(script: Script, precision: str) -> Rank:
    """Return what rank 0 does in one step."""
    flags = (*FLAGS, "--precision", precision)
    return script.run(*flags, ranks=2, train=32, val=8, keep=True, operations=True)[0]


def dtypes(rank: Rank, name: str) -> set[torch.dtype]:
    """Return the formats of the operations in the training step."""
    return {op.dtype for op in rank.operations if op.name == name and op.updates == 0 and op.numel > 8}


def names(dtypes: set[torch.dtype]) -> str:
    """Return the names of some formats."""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no format"
