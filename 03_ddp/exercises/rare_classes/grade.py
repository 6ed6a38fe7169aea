"""Every number of ranks makes the updates of one rank with the same global batch, and prints its training loss."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.catalogue import Exercise
from clinic.observe import Observed, Script, percent

BATCH = 18
FLAGS = ("--global_batch_size", BATCH, "--optimizer", "sgd", "--lr", 1e-9, "--warmup", 0, "--dropout", "false")
"""the weights hardly change, so that each step is a trial of its own"""
CLOSE = 1e-4
"""relative; rounding changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    faulty = script.folder / script.path.name  # on one rank it is right
    faulty.write_text(Exercise(Path(__file__).parent).faulty())
    for train, all_ranks in ((4 * BATCH, (1, 3)), (4 * BATCH + 7, (2,))):
        expected = run(Script(faulty, script.folder), train, 1)
        for ranks in all_ranks:
            if wrong := list(differences(run(script, train, ranks), expected, train, ranks)):
                yield from wrong
                return


def run(script: Script, train: int, ranks: int) -> Observed:
    """Train for an epoch."""
    return script.run(*FLAGS, train=train, val=8, ranks=ranks)


def differences(found: Observed, expected: Observed, train: int, ranks: int) -> Iterator[str]:
    """Yield how a run differs from the one that is right."""
    where = "on one rank" if ranks == 1 else f"on {ranks} ranks"
    right = "that of the script before you changed it" if ranks == 1 else "that of one rank with the same global batch"
    for number, rank in enumerate(found.ranks):
        if len(rank.updates) != len(expected[0].updates):
            yield f"{where}, rank {number} made {len(rank.updates)} updates, not {len(expected[0].updates)}"
            return
    if (computed := sum(len(rank.trained) for rank in found.ranks)) != train:
        yield f"{where}, {computed} samples are trained on in an epoch, which has {train}"
        return
    for rank in found.ranks:
        for step, (update, wanted) in enumerate(zip(rank.updates, expected[0].updates, strict=True), 1):
            off = difference(update.gradient, wanted.gradient)
            if not off < CLOSE:
                size = min(BATCH, train - (step - 1) * BATCH)
                yield (
                    f"{where}, the gradient that the optimizer gets in step {step}, which has {size} samples, "
                    f"differs by {percent(off)} from {right}"
                )
                return
    names = ("train_loss", "val_loss") if train % BATCH == 0 else ("val_loss",)
    for name in names:
        printed, loss = found.epochs[0][name], expected.epochs[0][name]
        if not math.isclose(printed, loss, rel_tol=1e-5):
            which = {"train_loss": "training", "val_loss": "validation"}[name]
            yield f"{where}, the {which} loss is reported as {printed:.5f}; {right} is {loss:.5f}"


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
