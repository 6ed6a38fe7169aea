"""In the first epoch only the last layer is trained, then all are, with the gradients of the whole global batch.

The gradients of four ranks are compared with those of one process, for which the exercise's own script is right. (With
two ranks, one half would do where one divided by the number of ranks is meant.)
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from clinic.observe import Rank
from clinic.runs import Fault, Observed, Script, difference, percent

STEPS = 4
"""of each epoch"""
EPOCHS = 3
RANKS = 4
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01, "--dropout", "false")
DATA = {"train": 32 * STEPS, "val": 32, "keep": True}
LAYERS = ("the last layer", "the other layers")
CLOSE = 1e-4
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    flags = (*FLAGS, "--epochs", EPOCHS)
    expected = script.as_started().run(*flags, **DATA)[0]
    run = script.run(*flags, ranks=RANKS, **DATA)
    for number, rank in enumerate(run.ranks):
        if wrong := first_wrong(rank, expected):
            yield f"on rank {number} of {RANKS}, {wrong}"
            return
    if unequal := first_differing(run):
        yield f"with {RANKS} ranks, {unequal}"
        return
    when = "in a run that is stopped in its last epoch and resumed"
    stopped = script.run(*flags, "--save_interval", 1, ranks=RANKS, **DATA, stop_after=2 * STEPS + 1)
    try:
        resumed = script.run(
            *flags, "--save_interval", 1, "--resume", "true", ranks=RANKS, **DATA, run_dir=stopped.run_dir
        )
    except Fault as fault:
        yield f"{when}, {fault}"
        return
    for number, rank in enumerate(resumed.ranks):
        if still := layers_that_stay(weights_of(rank)):
            yield f"{when}, {still} do not change on rank {number}"
            return
    if unequal := first_differing(resumed):
        yield f"{when}, {unequal}"


def halves(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the last layer (a weight and a bias), and those of the other layers."""
    flat = [tensor.flatten() for tensor in tensors]
    return torch.cat(flat[-2:]), torch.cat(flat[:-2])


def weights_of(rank: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the `halves` of the weights before each step, and at the end."""
    return [halves(call.weights) for call in rank.training] + [halves(list(rank.weights.values()))]


def first_wrong(rank: Rank, expected: Rank) -> str | None:
    """Return what is wrong with the epochs of a rank."""
    weights = weights_of(rank)
    if len(rank.updates) != len(expected.updates) or len(weights) != len(expected.updates) + 1:
        return f"there are {len(rank.updates)} updates in {EPOCHS} epochs, not {len(expected.updates)}"
    for step in range(1, STEPS + 1):
        if not torch.equal(weights[step][1], weights[0][1]):
            return f"step {step} of the first epoch changes other layers than the last one"
    for epoch in (1, 2):
        first = (epoch - 1) * STEPS
        found, wanted = (halves(update.gradients) for update in (rank.updates[first], expected.updates[first]))
        for layers in range(epoch):
            if not found[layers].any():
                return f"in the first step of epoch {epoch}, no gradients reach {LAYERS[layers]}"
            if not (off := difference(found[layers], wanted[layers])) < CLOSE:
                which = f"in the first step of epoch {epoch}, the gradients of {LAYERS[layers]}"
                return f"{which} differ by {percent(off)} from those of one process with the same global batch"
    if still := layers_that_stay(weights[STEPS:]):
        return f"{still} do not change after the first epoch"
    return None


def layers_that_stay(weights: list[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """Return which layers do not change from one step to the next."""
    for before, after in pairwise(weights):
        for layers in (1, 0):
            if torch.equal(before[layers], after[layers]):
                return f"the weights of {LAYERS[layers]}"
    return None


def first_differing(run: Observed) -> str | None:
    """Return which weights are the first ones that differ between two ranks."""
    for step, (of_rank_0, *of_others) in enumerate(zip(*map(weights_of, run.ranks), strict=True)):
        for layers in (1, 0):
            off = max(difference(other[layers], of_rank_0[layers]) for other in of_others)
            if not off < CLOSE:
                return f"after {step} steps, the weights of {LAYERS[layers]} differ by {percent(off)} between the ranks"
    return None
