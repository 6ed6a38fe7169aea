"""A run that is stopped within an epoch, after it, and within the next must end like one that was never stopped."""

from collections.abc import Iterator

import torch

from clinic.notes import Rank
from clinic.observe import Observed, Script

FLAGS = ("--batch_size", 16, "--epochs", 2)
TRAIN, VAL = 64, 32
"""four updates in each of the two epochs"""
PIECES = (2, 2, 2, 2)
"""updates from one stop to the next"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    whole = script.run(*FLAGS, train=TRAIN, val=VAL)[0]
    if len(whole.updates) != sum(PIECES):
        yield f"a run that is not stopped made {len(whole.updates)} updates, not {sum(PIECES)}"
        return
    done = 0
    run: Observed | None = None
    for piece in PIECES:
        last = done + piece == sum(PIECES)
        run = script.run(
            *FLAGS,
            *(("--resume", "true") if run else ()),
            train=TRAIN,
            val=VAL,
            run_dir=run.run_dir if run else None,
            stop_after=None if last else piece,
        )
        if wrong := difference(run[0], whole, done, piece):
            when = f"stopped after {done} of {sum(PIECES)} updates and resumed" if done else "at first"
            yield f"{when}, {wrong}"
            return
        done += piece
    if not same_weights(run[0], whole):
        yield "at the end, the weights are not those of a run that was not stopped"


def difference(part: Rank, whole: Rank, done: int, piece: int) -> str | None:
    """Return how the updates of a part of the run differ from those of the whole one."""
    expected = whole.updates[done : done + piece]
    if len(part.updates) != piece:
        return f"the run made {len(part.updates)} updates, not {piece}"
    size = len(whole.trained) // len(whole.updates)
    if part.trained != whole.trained[done * size : (done + piece) * size]:
        return "the run trains on other samples than one that was not stopped"
    if [update.lr for update in part.updates] != [update.lr for update in expected]:
        return "the learning rates are not those of a run that was not stopped"
    for number, (ours, theirs) in enumerate(zip(part.updates, expected, strict=True), done + 1):
        if not torch.equal(ours.gradient, theirs.gradient):
            return f"the gradient of update {number} is not that of a run that was not stopped"
    return None


def same_weights(part: Rank, whole: Rank) -> bool:
    """Whether all weights are equal, bit for bit."""
    return all(torch.equal(weight, whole.weights[name]) for name, weight in part.weights.items())
