"""A batch in parts has the loss and the gradients of the whole batch, also where the parts are of unequal size."""

import math
from collections import Counter
from collections.abc import Iterator

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Observed, Script, difference, percent

PARTS = 4
TRAIN = 44
"""samples: steps of 9, 9 and 4 on each of two ranks"""
FLAGS = (
    *("--optimizer", "sgd", "--lr", 1e-9, "--max_grad_norm", "null", "--batch_size", 9),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    expected = train(script.as_started(), 1)  # in one part it is right
    found = train(script, PARTS)
    where = f"with --accumulate {PARTS}"
    if (samples := samples_of(found)) != (wanted := samples_of(expected)):
        yield f"{where}, the steps have {samples} samples on rank 0, not {wanted}"
        return
    parts = Counter(call.updates for call in found[0].training)
    if wrong := [number for number in parts.values() if number != PARTS]:
        yield f"{where}, a batch is computed in {wrong[0]} part{'s' * (wrong[0] > 1)}"
    for step, updates in enumerate(zip(found[0].updates, expected[0].updates, strict=True)):
        off = difference(*(update.gradient for update in updates))
        if not off < 1e-4:
            yield (
                f"{where}, the gradients of step {step + 1}, with {samples[step]} samples per rank, differ by "
                f"{percent(off)} from those of the whole batch"
            )
            break
    printed, right = found.epochs[0]["train_loss"], expected.epochs[0]["train_loss"]
    if not math.isclose(printed, right, rel_tol=1e-5):
        yield f"{where}, the training loss is reported as {printed:.5f}; that of whole batches is {right:.5f}"


def train(script: Script, parts: int) -> Observed:
    """Run an epoch with each batch in some number of parts."""
    return script.run(*FLAGS, "--accumulate", parts, ranks=2, train=TRAIN, val=8)


def samples_of(run: Observed) -> list[int]:
    """Return how many samples rank 0 has in each step."""
    calls = run[0].training
    return [sum(call.size for call in calls if call.updates == step) for step in range(len(run[0].updates))]
