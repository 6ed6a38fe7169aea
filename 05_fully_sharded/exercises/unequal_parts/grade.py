"""A batch in parts has the loss and the gradients of the whole batch, also where the parts are of unequal size."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.catalogue import Exercise
from clinic.observe import Observed, Script, percent
from clinic.sharded import note_steps

PARTS = 4
TRAIN = 44
"""samples: steps of 9, 9 and 4 on each of two ranks"""
FLAGS = ("--optimizer", "sgd", "--lr", 1e-9, "--batch_size", 9, "--vit_width", 32, "--vit_depth", 2)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    faulty = script.folder / script.path.name  # in one part it is right
    faulty.write_text(Exercise(Path(__file__).parent).faulty())
    expected = run(Script(faulty, script.folder), 1)
    found = run(script, PARTS)
    steps, wanted = found[0].extra.steps, expected[0].extra.steps
    if [step.samples for step in steps] != [step.samples for step in wanted]:
        samples, all_samples = ([step.samples for step in some] for some in (steps, wanted))
        yield f"with --accumulate {PARTS}, the steps have {samples} samples on rank 0, not {all_samples}"
        return
    if parts := [len(step.losses) for step in steps if len(step.losses) != PARTS]:
        yield f"with --accumulate {PARTS}, a batch is computed in {parts[0]} part(s)"
    for number, (step, right) in enumerate(zip(steps, wanted, strict=True), 1):
        off = difference(step.gradients, right.gradients)
        if not off < 1e-4:
            yield (
                f"with --accumulate {PARTS}, the gradients of step {number}, with {right.samples} samples per rank, "
                f"differ by {percent(off)} from those of the whole batch"
            )
            break
    printed, right = found.epochs[0]["train_loss"], expected.epochs[0]["train_loss"]
    if not math.isclose(printed, right, rel_tol=1e-5):
        reported = f"the training loss is reported as {printed:.5f}"
        yield f"with --accumulate {PARTS}, {reported}; that of whole batches is {right:.5f}"


def run(script: Script, parts: int) -> Observed:
    """Run an epoch with each batch in some number of parts."""
    flags = (*FLAGS, "--accumulate", parts)
    return script.run(*flags, ranks=2, train=TRAIN, val=8, notes=False, watch=note_steps)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to that of the second."""
    a, b = (torch.cat([part[name].flatten() for name in expected]) for part in (found, expected))
    return ((a - b).norm() / b.norm()).item()
