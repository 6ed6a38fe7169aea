"""With 1, 2 and 3 ranks, loss and accuracy must be those of all validation samples, each counted once."""

import math
from collections.abc import Iterator

from clinic.observe import Script

VAL = 61
"""not a multiple of 2 or 3"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for ranks in (1, 2, 3):
        run = script.run("--batch_size", 16, ranks=ranks, train=48, val=VAL, keep=True)
        samples, loss, right = run.validated()
        where = f"with {ranks} rank{'s' if ranks > 1 else ''} and {VAL} validation samples"
        if len(samples) < VAL:
            yield f"{where}: {VAL - len(samples)} of them were seen by no rank"
            continue
        (epoch,) = run.epochs
        count = epoch["val_accuracy"] * VAL
        if abs(count - right) > 1e-3:
            yield f"{where}: the model got {right} right, but the reported accuracy means {count:.3f} of {VAL}"
        if not math.isclose(epoch["val_loss"], loss, rel_tol=1e-5):
            yield f"{where}: their mean loss is {loss:.5f}, but {epoch['val_loss']:.5f} is reported"
