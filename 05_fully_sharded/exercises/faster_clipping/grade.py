"""Two ranks must make the clipped updates of one rank, whose own part of a gradient is all of it.

The limit is such that some of the gradients are clipped and others are not, and that in the first step it is smaller
than the norm of one rank's part and larger than that of the other one's.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.catalogue import Exercise
from clinic.observe import Script, percent
from clinic.sharded import Step, note_steps

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
    faulty = script.folder / script.path.name
    faulty.write_text(Exercise(Path(__file__).parent).faulty())
    expected = applied(run(Script(faulty, script.folder), 1))
    found = applied(run(script, 2))
    where = f"with --max_grad_norm {LIMIT} and two ranks"
    if len(found) != len(expected):
        yield f"{where}, there are {len(found)} updates in {len(expected)} steps"
        return
    for step, (update, right) in enumerate(zip(found, expected, strict=True), 1):
        off = ((update - right).norm() / right.norm()).item()
        if not off < CLOSE:
            norms = f"its norm is {update.norm():.3g}, and on one rank {right.norm():.3g}"
            yield f"{where}, the gradient of update {step} differs by {percent(off)} from that of one rank: {norms}"
            return
    found = applied(run(script, 2, "--precision", "fp16"))
    if not found or not 0.95 * LIMIT < found[0].norm() < 1.05 * LIMIT:
        what = f"the first gradient has a norm of {found[0].norm():.3g}" if found else "no update is made"
        yield f"with --max_grad_norm {LIMIT}, --precision fp16 and two ranks, {what}"


def run(script: Script, ranks: int, *flags: str) -> list[list[Step]]:
    """Return the steps of each rank."""
    observed = script.run(*FLAGS, *flags, ranks=ranks, train=STEPS * 16, val=8, notes=False, watch=note_steps)
    return [rank.extra.steps for rank in observed.ranks]


def applied(ranks: list[list[Step]]) -> list[torch.Tensor]:
    """Return the whole gradient of each update, as follows from what SGD with momentum does to the weights."""
    gradients: list[torch.Tensor] = []
    average: torch.Tensor | None = None
    for parts in zip(*ranks, strict=True):
        if not parts[0].lrs:
            continue
        moved = [
            torch.cat([part.moved[name] - part.weights[name] for part in parts]).flatten() for name in parts[0].moved
        ]
        new = -torch.cat(moved).double() / parts[0].lrs[0]
        gradients.append(new if average is None else new - 0.9 * average)
        average = new
    return gradients
