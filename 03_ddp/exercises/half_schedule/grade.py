"""With one rank and with two, the learning rate must rise and fall over all updates of the run, and end near 0."""

import math
from collections.abc import Iterator

from clinic.observe import Script

BATCH, EPOCHS, TRAIN, LR, WARMUP = 16, 6, 90, 1e-3, 0.1
"""the last batch of an epoch is smaller than the others, with one rank and with two"""
FLAGS = (
    "--batch_size",
    BATCH,
    "--epochs",
    EPOCHS,
    "--lr",
    LR,
    "--warmup",
    WARMUP,
    "--lr_scaling",
    "linear",
    "--base_batch_size",
    BATCH,
)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for ranks in (1, 2):
        run = script.run(*FLAGS, ranks=ranks, train=TRAIN, val=32)
        where = f"with {ranks} rank{'s' if ranks > 1 else ''}"
        for number, rank in enumerate(run.ranks):
            rates = [update.lr for update in rank.updates]
            steps = EPOCHS * math.ceil(TRAIN / (BATCH * ranks))
            if len(rates) != steps:
                yield f"{where}, rank {number} made {len(rates)} updates, not {steps}"
                break
            peak = max(rates)
            if rates[-1] > 0.05 * peak:
                yield f"{where}, the learning rate of the last update is still {rates[-1] / peak:.0%} of the highest"
                break
            if misfits := [step for step, rate in enumerate(rates) if not fits(rate / (LR * ranks), step, steps)]:
                yield (
                    f"{where}, the learning rate does not follow its course over all {steps} updates: "
                    f"in update {misfits[0] + 1} it is {rates[misfits[0]]:.1e}"
                )
                break


def fits(factor: float, step: int, steps: int) -> bool:
    """Return whether this is the factor on the learning rate in ``step`` of ``steps``, or one step before or after."""
    near = [course(max(0, min(other, steps)), steps) for other in (step - 1, step, step + 1)]
    low = 0.0 if step == 0 else min(near)
    return low - 0.02 <= factor <= max(near) + 0.02


def course(step: int, steps: int) -> float:
    """Return the lesson's factor: it rises along a straight line, then falls along a cosine."""
    warmup = WARMUP * steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
