"""In bf16 every weight follows a small learning rate, while the model is computed and sent in bf16."""

from collections.abc import Iterator

import torch

from clinic.observe import Fault, Script
from clinic.sharded import Step, note_steps

LR = 1e-5
FLAGS = ("--optimizer", "adam", "--lr", LR, "--warmup", 0, "--batch_size", 16, "--vit_width", 32, "--vit_depth", 2)
NOT_ZERO = 1e-6
"""gradients below are left out: Adam divides by their size, to which it adds 1e-8"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    step = first_step(script, "bf16")
    gradient = torch.cat([part.double().flatten() for part in step.gradients.values()])
    moved = torch.cat([(step.moved[name].double() - step.weights[name].double()).flatten() for name in step.gradients])
    moved = moved[gradient.abs() > NOT_ZERO].abs()
    share = (moved > 0).double().mean().item() if len(moved) else 0.0
    if share < 0.99:
        yield f"in bf16 with --lr {LR:g}, the first update changes {share:.0%} of the weights that have a gradient"
    elif not 0.9 * LR < moved.median() < 1.1 * LR:
        yield f"in bf16, Adam's first update with --lr {LR:g} changes a weight by {moved.median():.1e}"
    if step.matrix_dtypes != {torch.bfloat16}:
        yield f"with --precision bf16, matrix products are computed in {names(step.matrix_dtypes)}"
    if (sent := {gather.dtype for gather in step.gathers}) != {torch.bfloat16}:
        yield f"with --precision bf16, the weights are sent in {names(sent)}"
    if step.state_dtypes - {torch.float32, torch.float64}:
        yield f"the running means of the optimizer are stored in {names(step.state_dtypes)}"
    try:
        if wrong := first_step(script, "fp16").state_dtypes - {torch.float32, torch.float64}:
            yield f"with --precision fp16, the running means of the optimizer are stored in {names(wrong)}"
    except Fault as fault:
        yield f"with --precision fp16, it ends with: {str(fault).removeprefix('the script ended with: ')}"
    plain = first_step(script, "fp32")
    if plain.matrix_dtypes != {torch.float32}:
        yield f"with --precision fp32, matrix products are computed in {names(plain.matrix_dtypes)}"


def first_step(script: Script, precision: str) -> Step:
    """Return what rank 0 does in the first step."""
    flags = (*FLAGS, "--precision", precision)
    return script.run(*flags, ranks=2, train=32, val=8, notes=False, watch=note_steps)[0].extra.steps[0]


def names(dtypes: set[torch.dtype]) -> str:
    """Return the names of some formats."""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no format"
