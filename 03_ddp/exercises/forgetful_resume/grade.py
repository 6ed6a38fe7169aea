"""A run that is stopped after an epoch, and within the next, must go on like one that was never stopped."""

from collections.abc import Iterator

import torch

from clinic.observe import Rank
from clinic.runs import Script

FLAGS = ("--batch_size", 8, "--epochs", 2, "--save_interval", 2)
TRAIN, STEPS = 64, 4
"""updates in each of the two epochs, on two ranks"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    data = {"ranks": 2, "train": TRAIN, "val": 32}
    whole = script.run(*FLAGS, **data)
    if len(whole[0].updates) != 2 * STEPS:
        yield f"a run that is not stopped made {len(whole[0].updates)} updates, not {2 * STEPS}"
        return
    run = script.run(*FLAGS, **data, stop_after=STEPS)
    for done, last in ((STEPS, STEPS + 2), (STEPS + 2, None)):
        run = script.run(*FLAGS, "--resume", "true", **data, run_dir=run.run_dir, stop_after=last and last - done)
        for number, rank in enumerate(run.ranks):
            if wrong := difference(rank, whole[number], done, (last or 2 * STEPS) - done):
                yield f"stopped after {done} of {2 * STEPS} updates and resumed, on rank {number} {wrong}"
                return
    if any(not torch.equal(weight, whole[0].weights[name]) for name, weight in run[0].weights.items()):
        yield "at the end, the weights are not those of a run that was not stopped"


def difference(part: Rank, whole: Rank, done: int, steps: int) -> str | None:
    """Return how the updates of a part of the run differ from those of the whole one."""
    if len(part.updates) != steps:
        return f"the run made {len(part.updates)} updates, not {steps}"
    size = len(whole.trained) // len(whole.updates)
    if part.trained[: steps * size] != whole.trained[done * size : (done + steps) * size]:
        return "the run trains on other samples than one that was not stopped"
    for number, (ours, theirs) in enumerate(zip(part.updates, whole.updates[done:], strict=False), done + 1):
        if ours.lr != theirs.lr:
            rates = f"a learning rate of {ours.lr:.2e}, but {theirs.lr:.2e} in a run that was not stopped"
            return f"update {number} has {rates} (each update uses the learning rate that is stored in the optimizer)"
        if not torch.equal(ours.gradient, theirs.gradient):
            before = "; so the weights or the random numbers before it differ" if number > done + 1 else ""
            return f"the gradient of update {number} is not that of a run that was not stopped{before}"
    return None
