"""Three epochs on two ranks: every epoch must use each sample once, and put other samples together into a step."""

from collections.abc import Iterator
from itertools import combinations

from clinic.runs import Observed, Script

EPOCHS = 3
FLAGS = ("--batch_size", 16)
DATA = {"train": 160, "val": 32, "ranks": 2}


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run(*FLAGS, "--epochs", EPOCHS, **DATA)
    if wrong := list(faults_of(run)):
        yield from wrong
        return
    length = len(run[0].training) // EPOCHS
    first = script.run(*FLAGS, "--epochs", EPOCHS, **DATA, stop_after=length + 1)  # in the second epoch
    second = script.run(*FLAGS, "--epochs", EPOCHS, "--resume", "true", **DATA, run_dir=first.run_dir)
    for number, rank in enumerate(run.ranks):
        resumed = f"stopped after the first of {EPOCHS} epochs and resumed, rank {number}"
        before, after = part(rank.trained, 0), second[number].trained
        if len(before + after) != len(rank.trained):
            yield f"{resumed} does not train on as many samples as it should"
        elif after[: len(before)] == before:
            yield f"{resumed} has the order of that epoch again"
        elif before + after != rank.trained:
            yield f"{resumed} has other orders than in a run without a stop"


def faults_of(run: Observed) -> Iterator[str]:
    """Yield what is wrong in a run that was not stopped."""
    orders, steps = [], []
    for epoch in range(EPOCHS):
        shares = [part(rank.trained, epoch) for rank in run.ranks]
        if both := set(shares[0]) & set(shares[1]):
            yield f"in epoch {epoch + 1} both ranks trained on the same {len(both)} samples"
        if unseen := DATA["train"] - len(set().union(*shares)):
            yield f"in epoch {epoch + 1}, {unseen} of {DATA['train']} samples were trained on by no rank"
        orders.append(shares)
        calls = [part([call.samples for call in rank.training], epoch) for rank in run.ranks]
        steps.append([set().union(*samples) for samples in zip(*calls, strict=False)])
    for a, b in combinations(range(EPOCHS), 2):
        if orders[a] == orders[b]:
            yield f"epochs {a + 1} and {b + 1} used the samples in the same order"
        elif share_of_same_pairs(steps[a], steps[b]) > 0.5:
            yield f"in epochs {a + 1} and {b + 1} most samples were in a step with the same other samples"


def part(all_epochs: list, epoch: int) -> list:
    """Return what belongs to one epoch, counted from 0."""
    length = len(all_epochs) // EPOCHS
    return all_epochs[epoch * length : (epoch + 1) * length]


def share_of_same_pairs(these: list[set[int]], those: list[set[int]]) -> float:
    """Return which share of the pairs that are together in one of ``these`` steps are so in one of ``those`` too.

    For two random orders it is about 1 / (number of steps).
    """
    pairs = [{pair for step in steps for pair in combinations(sorted(step), 2)} for steps in (these, those)]
    return len(pairs[0] & pairs[1]) / max(1, len(pairs[0]))
