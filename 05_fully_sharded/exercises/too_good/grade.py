"""What is computed for a byte depends on the bytes of its window and on none after it, in training and in validation.

The first validation sequence is the training sequence too, and each of the others differs from it in one byte. So one
run shows, for every pair of positions, whether the scores at one depend on the byte at the other.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from clinic import coded
from clinic.observe import Shown
from clinic.runs import Script, difference

WINDOW, DEPTH = 32, 2
REACH = DEPTH * (WINDOW - 1)
"""how many positions before its own the farthest byte is that can change a score, through all blocks"""
LENGTH = REACH + 10
FLAGS = (
    *("--optimizer", "sgd", "--lr", 1e-9, "--warmup", 0, "--batch_size", 1),
    *("--width", 64, "--depth", DEPTH, "--sequence_length", LENGTH),
)
NOTHING = 1e-5
"""relative difference of scores that do not depend on what was changed; others differ by at least 30 times as much"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run(*FLAGS, data_dir=write_data(script.folder), keep=True)
    trained = scores_of(run[0].training[0])
    first, *changed = (scores_of(call) for call in run[0].shown if not call.training and call.size == 1)
    if len(changed) != LENGTH or not torch.stack([trained, first, *changed]).isfinite().all():
        yield "the scores are not finite numbers for every byte of the validation text"
        return
    by_position = [
        (position, other)
        for other, scores in enumerate(changed)
        for position in range(LENGTH)
        if difference(scores[position], first[position]) > NOTHING
    ]
    distances = {position - other for position, other in by_position}
    if min(distances) < 0:
        position, other = min(by_position, key=lambda pair: pair[0] - pair[1])
        yield f"the scores at position {position}, which predict byte {position + 1}, depend on byte {other}"
    if max(distances) > REACH:
        yield (
            f"the scores at a position depend on the byte {max(distances)} positions before it: in {DEPTH} blocks with "
            f"windows of {WINDOW} bytes it can be {REACH} at most"
        )
    elif missing := set(range(REACH + 1)) - distances:
        yield (
            f"no score depends on the byte {min(missing)} position(s) before its own, which is within the reach of "
            f"{DEPTH} blocks with windows of {WINDOW} bytes"
        )
    if difference(trained, first) > NOTHING:
        yield "with the same weights and the same bytes, the model has other scores in training than in validation"


def scores_of(call: Shown) -> torch.Tensor:
    """Return the scores of the only sequence of a call of the model, (LENGTH, 256)."""
    assert call.outputs is not None, "this needs keep=True"
    return call.outputs[0]


def write_data(folder: Path) -> Path:
    """Write the text; return its data folder."""
    base = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(3))
    changed = base.repeat(LENGTH, 1)
    changed[range(LENGTH), range(LENGTH)] += 128
    end = torch.zeros(1, dtype=torch.int64)  # the last target
    data_dir = folder / "data_changed_bytes"
    coded.write_text(data_dir, torch.cat([base, end]), torch.cat([base, changed.flatten() % 256, end]))
    return data_dir
