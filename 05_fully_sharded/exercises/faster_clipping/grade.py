"""Two ranks must make the clipped updates of one rank, whose own part of a gradient is all of it.

The limit is such that some of the gradients are clipped and others are not, and that in the first step it is smaller
than the norm of one rank's part and larger than that of the other one's.
"""

from collections.abc import Iterator

import torch

from clinic.runs import Script, difference, percent

LIMIT = 2.4
STEPS = 8
FLAGS = (
    *("--optimizer", "sgd", "--lr", 0.1, "--warmup", 0, "--global_batch_size", 16),
    *("--vit_width", 32, "--vit_depth", 2, "--max_grad_norm", LIMIT),
)
CLOSE = 1e-3
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    expected = gradients(script.as_started(), 1)
    found = gradients(script, 2)
    where = f"with --max_grad_norm {LIMIT} and two ranks"
    if len(found) != len(expected):
        yield f"{where}, there are {len(found)} updates in {len(expected)} steps"
        return
    for step, (gradient, right) in enumerate(zip(found, expected, strict=True), 1):
        if not (off := difference(gradient, right)) < CLOSE:
            norms = f"its norm is {gradient.norm():.3g}, and on one rank {right.norm():.3g}"
            yield f"{where}, the gradient of update {step} differs by {percent(off)} from that of one rank: {norms}"
            return
    found = gradients(script, 2, "--precision", "fp16")
    if not found or not 0.95 * LIMIT < found[0].norm() < 1.05 * LIMIT:
        what = f"the first gradient has a norm of {found[0].norm():.3g}" if found else "no update is made"
        yield f"{where} and --precision fp16, {what}"


def gradients(script: Script, ranks: int, *flags: str) -> list[torch.Tensor]:
    """Return the whole gradient that the optimizers of all ranks together are given in each update."""
    run = script.run(*FLAGS, *flags, ranks=ranks, train=STEPS * 16, val=8)
    found = []
    for updates in zip(*(rank.updates for rank in run.ranks), strict=True):
        weights = zip(*(update.gradients for update in updates), strict=True)
        found.append(torch.cat([torch.cat(parts).flatten() for parts in weights]))
    return found
