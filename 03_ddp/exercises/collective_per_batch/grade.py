"""With equally many batches on each rank, and with one more on rank 0, all ranks must call the same collectives."""

import math
from collections.abc import Iterator
from functools import partial

from clinic.collectives import apart, compare_collectives
from clinic.observe import Fault, Script

RANKS = 2


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for val in (33, 35, 32):
        where = f"with {val} validation samples, two ranks and batches of 16"
        notes = script.folder / f"collectives_{val}"
        notes.mkdir()
        watch = partial(compare_collectives, notes=notes, ranks=RANKS)
        try:
            run = script.run("--batch_size", 16, ranks=RANKS, train=64, val=val, keep=True, watch=watch)
        except Fault:
            if not apart(notes):
                raise
        if waiting := apart(notes):
            yield f"{where}: {waiting}"
            continue
        samples, loss, right = run.validated()
        if len(samples) < val:
            yield f"{where}: {val - len(samples)} of them were seen by no rank"
            continue
        (epoch,) = run.epochs
        count = epoch["val_accuracy"] * val
        if abs(count - right) > 1e-3:
            yield f"{where}: the model got {right} right, but the reported accuracy means {count:.3f}"
        if not math.isclose(epoch["val_loss"], loss, rel_tol=1e-5):
            yield f"{where}: their mean loss is {loss:.5f}, but {epoch['val_loss']:.5f} is reported"
