"""Every number of ranks makes the updates of one rank with the same global batch, and prints its training loss."""

import math
from collections.abc import Iterator

from clinic.runs import Observed, Script, difference, percent

BATCH = 18
FLAGS = ("--global_batch_size", BATCH, "--optimizer", "sgd", "--lr", 1e-9, "--warmup", 0, "--dropout", "false")
"""the weights hardly change, so that each step is a trial of its own"""
CLOSE = 1e-4
"""relative; rounding changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for train, all_ranks in ((4 * BATCH, (1, 3)), (4 * BATCH + 7, (2,))):
        expected = script.as_started().run(*FLAGS, train=train, val=8)  # on one rank it is right
        for ranks in all_ranks:
            found = script.run(*FLAGS, train=train, val=8, ranks=ranks)
            if wrong := list(differences(found, expected, train, ranks)):
                yield from wrong
                return


def differences(found: Observed, expected: Observed, train: int, ranks: int) -> Iterator[str]:
    """Yield how a run differs from the one that is right."""
    where = "on one rank" if ranks == 1 else f"on {ranks} ranks"
    right = "that of the script before you changed it" if ranks == 1 else "that of one rank with the same global batch"
    steps = len(expected[0].updates)
    for number, rank in enumerate(found.ranks):
        if len(rank.updates) != steps:
            yield f"{where}, rank {number} made {len(rank.updates)} updates, not {steps}"
            return
    if (computed := sum(len(rank.trained) for rank in found.ranks)) != train:
        yield f"{where}, {computed} samples are trained on in an epoch, which has {train}"
        return
    for rank in found.ranks:
        for step, (update, wanted) in enumerate(zip(rank.updates, expected[0].updates, strict=True), 1):
            off = difference(update.gradient, wanted.gradient)
            if not off < CLOSE:
                size = min(BATCH, train - (step - 1) * BATCH)
                what = f"the gradient that the optimizer gets in step {step}, which has {size} samples"
                yield f"{where}, {what}, differs by {percent(off)} from {right}"
                return
    losses = {"train_loss": "training loss", "val_loss": "validation loss"}
    for name in losses if train % BATCH == 0 else ("val_loss",):
        printed, loss = found.epochs[0][name], expected.epochs[0][name]
        if not math.isclose(printed, loss, rel_tol=1e-5):
            yield f"{where}, the {losses[name]} is reported as {printed:.5f}; {right} is {loss:.5f}"
