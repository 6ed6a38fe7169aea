"""A run that is stopped within an epoch, after it, and within the next must end like one that was never stopped.

Two ranks must still have different dropout, also in a run that was started with ``--resume true``, as a job that Slurm
may start again always is.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from clinic.notes import Rank
from clinic.observe import Observed, Script

FLAGS = ("--batch_size", 16, "--epochs", 2)
TRAIN, VAL = 64, 32
"""four updates in each of the two epochs"""
PIECES = (2, 2, 2, 2)
"""updates from one stop to the next"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    if wrong := list(faults_of_dropout(script)):
        yield from wrong
        return
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
        return
    wholes = script.run(*FLAGS, ranks=2, train=TRAIN, val=VAL)
    stopped = script.run(*FLAGS, ranks=2, train=TRAIN, val=VAL, stop_after=1)
    resumed = script.run(*FLAGS, "--resume", "true", ranks=2, train=TRAIN, val=VAL, run_dir=stopped.run_dir)
    for number, (ours, theirs) in enumerate(zip(resumed.ranks, wholes.ranks, strict=True)):
        if wrong := difference(ours, theirs, 1, 3):
            yield f"two ranks, stopped after 1 of 4 updates and resumed: on rank {number}, {wrong}"
            return
        if not same_weights(ours, theirs):
            yield f"two ranks, stopped after 1 of 4 updates and resumed: rank {number} ends with other weights"
            return


def faults_of_dropout(script: Script) -> Iterator[str]:
    """Yield what is wrong with the random numbers of dropout on two ranks."""
    flags = ("--batch_size", 16, "--epochs", 1, "--resume", "true")
    run = script.run(*flags, ranks=2, train=TRAIN, val=VAL, watch=note_dropout)
    masks = [rank.extra for rank in run.ranks]
    if any(len(of_rank) < len(rank.updates) for of_rank, rank in zip(masks, run.ranks, strict=True)):
        yield "the model trains without dropout"
    elif any(torch.equal(a, b) for a, b in zip(*masks, strict=False)):
        yield "in training, dropout drops the same activations on both of two ranks"
    elif any(torch.equal(a, b) for of_rank in masks for a, b in pairwise(of_rank)):
        yield "in training, dropout drops the same activations in each step"


def note_dropout(_: Path) -> Callable[[], list[torch.Tensor]]:
    """Note which activations dropout keeps, in each call; see `Script.run`."""
    masks = []
    dropout = F.dropout

    def noted(activations: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        factors = dropout(torch.ones_like(activations), p, training)
        if not activations.is_meta and (factors == 0).any():  # on the meta device, shapes are tried out
            masks.append(factors == 0)
        return activations.mul_(factors) if inplace else activations * factors

    F.dropout = noted
    return lambda: masks


def difference(part: Rank, whole: Rank, done: int, piece: int) -> str | None:
    """Return how the updates of a part of the run differ from those of the whole one."""
    expected = whole.updates[done : done + piece]
    if len(part.updates) != piece:
        return f"the run made {len(part.updates)} updates, not {piece}"
    size = len(whole.trained) // len(whole.updates)
    if part.trained != whole.trained[done * size : (done + piece) * size]:
        return "the run trains on other samples than one that was not stopped"
    for number, (ours, theirs) in enumerate(zip(part.updates, expected, strict=True), done + 1):
        if ours.lr != theirs.lr:
            return (
                f"update {number} has a learning rate of {ours.lr:.2e}, but {theirs.lr:.2e} in a run that was not "
                "stopped (each update uses the learning rate that is stored in the optimizer)"
            )
        if not torch.equal(ours.gradient, theirs.gradient):
            return f"the gradient of update {number} is not that of a run that was not stopped"
    return None


def same_weights(part: Rank, whole: Rank) -> bool:
    """Whether all weights are equal, bit for bit."""
    return all(torch.equal(weight, whole.weights[name]) for name, weight in part.weights.items())
