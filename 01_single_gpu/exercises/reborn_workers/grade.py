"""Workers that are started anew in each epoch: the same ones are to serve all epochs, each with its own order."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from clinic.runs import Fault, Script

SAMPLES, EPOCHS, WORKERS = 96, 3, 2


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    flags = ("--batch_size", 16, "--epochs", EPOCHS, "--num_workers", WORKERS)
    rank = script.run(*flags, train=SAMPLES, val=32)[0]
    training = rank.training
    if len(training) < EPOCHS:
        yield f"in {EPOCHS} epochs it trains on {len(training)} batches"
        return
    per_epoch = len(training) // EPOCHS
    starts = [rank.shown.index(training[epoch * per_epoch]) for epoch in range(EPOCHS)] + [len(rank.shown)]
    epochs = [rank.shown[begin:end] for begin, end in pairwise(starts)]
    workers = [frozenset().union(*(call.children for call in epoch)) for epoch in epochs]
    if any(len(call.children) < WORKERS for call in training):
        yield f"with --num_workers {WORKERS}, fewer processes than that load what it trains on"
    for number in range(1, EPOCHS):
        if new := workers[number] - frozenset().union(*workers[:number]):
            yield f"in epoch {number + 1} of {EPOCHS}, {len(new)} processes that load data are new"
    if (most := max(len(call.children) for call in rank.shown)) > 2 * WORKERS:
        needed = f"{WORKERS} for training and {WORKERS} for validation are enough"
        yield f"{most} processes that load data exist at once, but {needed}"
    orders = [[sample for call in epoch if call.training for sample in call.samples] for epoch in epochs]
    if any(sorted(order) != list(range(SAMPLES)) for order in orders):
        yield f"not every epoch trains on each of the {SAMPLES} samples once"
    for a, b in combinations(range(EPOCHS), 2):
        if orders[a] == orders[b]:
            yield f"epochs {a + 1} and {b + 1} have the samples in the same order"
    if script.run(*flags, train=SAMPLES, val=32)[0].trained != rank.trained:
        yield "two runs with the same flags do not train on the samples in the same order"
    if len(rank.validated) != EPOCHS * 32 or len(set(rank.validated)) != 32:
        yield f"in {EPOCHS} epochs it does not validate on the same 32 samples each time"
    try:
        script.run("--batch_size", 16, "--num_workers", 0, train=32, val=32)
    except Fault as fault:
        yield f"with --num_workers 0, {fault}"
