"""Two ranks must make the clipped updates of one rank, whose own part of a gradient is all of it.

The smaller limit is between the norms of the two ranks' parts of the first gradient, so every gradient is longer. The
larger one is longer than every gradient, but shorter than the sum of the norms of its two parts.
"""

from collections.abc import Iterator

import torch

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Script, difference, percent

SMALL, LARGE = 0.6, 1.0
STEPS = 3
FLAGS = (
    *("--optimizer", "sgd", "--lr", 0.1, "--warmup", 0, "--global_batch_size", 16, "--seed", 8),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)
CLOSE = 1e-3
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for limit in (SMALL, LARGE):
        expected = gradients(script.as_started(), 1, limit)
        found = gradients(script, 2, limit)
        where = f"with --max_grad_norm {limit} and two ranks"
        if len(found) != len(expected):
            yield f"{where}, there are {len(found)} updates in {len(expected)} steps"
            return
        for step, (gradient, right) in enumerate(zip(found, expected, strict=True), 1):
            if not (off := difference(gradient, right)) < CLOSE:
                norms = f"its norm is {gradient.norm():.3g}, and on one rank {right.norm():.3g}"
                yield f"{where}, the gradient of update {step} differs by {percent(off)} from that of one rank: {norms}"
                return
    found = gradients(script, 2, SMALL, "--precision", "fp16")
    if not found or not 0.95 * SMALL < found[0].norm() < 1.05 * SMALL:
        what = f"the first gradient has a norm of {found[0].norm():.3g}" if found else "no update is made"
        yield f"with --max_grad_norm {SMALL}, two ranks and --precision fp16, {what}"


def gradients(script: Script, ranks: int, limit: float, *flags: str) -> list[torch.Tensor]:
    """Return the whole gradient that the optimizers of all ranks together are given in each update."""
    run = script.run(*FLAGS, "--max_grad_norm", limit, *flags, ranks=ranks, train=STEPS * 16, val=8)
    found = []
    for updates in zip(*(rank.updates for rank in run.ranks), strict=True):
        weights = zip(*(update.gradients for update in updates), strict=True)
        found.append(torch.cat([torch.cat(parts).flatten() for parts in weights]))
    return found
