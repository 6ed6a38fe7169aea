"""Three epochs on two ranks: each shows every sample once, and the samples meet others in each."""

from collections.abc import Iterator
from itertools import combinations

from clinic.observe import Observed, Script

EPOCHS, TRAIN = 3, 160


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    run = script.run("--batch_size", 16, "--epochs", EPOCHS, ranks=2, train=TRAIN, val=32)
    orders, steps = [], []
    for epoch in range(EPOCHS):
        shares = [part(rank.trained, epoch) for rank in run.ranks]
        seen = set().union(*shares)
        if both := set(shares[0]) & set(shares[1]):
            yield f"in epoch {epoch + 1} both ranks trained on the same {len(both)} samples"
        if len(seen) < TRAIN:
            yield f"in epoch {epoch + 1}, {TRAIN - len(seen)} of {TRAIN} samples were trained on by no rank"
        orders.append(shares)
        steps.append(steps_of(run, epoch))
    for a, b in combinations(range(EPOCHS), 2):
        if orders[a] == orders[b]:
            yield f"epochs {a + 1} and {b + 1} showed the samples in the same order"
        elif met_again(steps[a], steps[b]) > 0.5:
            yield f"in epochs {a + 1} and {b + 1} most samples met the same others in a step"


def part(all_epochs: list, epoch: int) -> list:
    """Return what belongs to one epoch, counted from 0."""
    length = len(all_epochs) // EPOCHS
    return all_epochs[epoch * length : (epoch + 1) * length]


def steps_of(run: Observed, epoch: int) -> list[set[int]]:
    """Return the samples of all ranks in each step of an epoch."""
    shown = [part([call.samples for call in rank.shown if call.training], epoch) for rank in run.ranks]
    return [set().union(*calls) for calls in zip(*shown, strict=False)]


def met_again(these: list[set[int]], those: list[set[int]]) -> float:
    """Return which share of the pairs that meet in one of ``these`` steps meets in one of ``those`` too.

    For two random orders it is about one in the number of steps.
    """
    pairs = [{pair for step in steps for pair in combinations(sorted(step), 2)} for steps in (these, those)]
    return len(pairs[0] & pairs[1]) / max(1, len(pairs[0]))
