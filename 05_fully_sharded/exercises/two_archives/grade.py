"""Several ranks must train as one rank does, whichever archives the samples of a rank are from.

With one rank the exercise's own script is right, because each batch has samples of both archives. With two ranks, and
with four of one sample each, every rank has samples of one archive only. What is compared are the outputs of the model
in each step, which depend on all earlier updates, and the validation loss after the last one.
"""

import math
from collections.abc import Iterator

import torch

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Observed, Script, difference, percent

STEPS = 4
FLAGS = (
    *("--optimizer", "sgd", "--lr", 1.0, "--warmup", 0),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)
CASES = {
    "two ranks": (2, 8, ()),
    "two ranks and --shard root --accumulate 2": (2, 8, ("--shard", "root", "--accumulate", 2)),
    "four ranks of one sample each": (4, 4, ()),
}
"""ranks, global batch size, more flags"""
CLOSE = 1e-4
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    expected = {batch: train(script.as_started(), 1, batch) for batch in {batch for _, batch, _ in CASES.values()}}
    for batch, right in expected.items():
        if wrong := first_wrong(train(script, 1, batch), right):
            yield f"with one rank, {wrong}"
            return
    for where, (ranks, batch, flags) in CASES.items():
        if wrong := first_wrong(train(script, ranks, batch, *flags), expected[batch]):
            yield f"with {where}, {wrong}"
            return


def train(script: Script, ranks: int, batch: int, *flags: object) -> Observed:
    """Run an epoch."""
    flags = (*FLAGS, "--global_batch_size", batch, *flags)
    return script.run(*flags, ranks=ranks, train=STEPS * batch, val=8, keep=True)


def steps(run: Observed) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and outputs of each step, of the samples of all ranks in the order of the global batch."""
    found = []
    for step in range(min(len(rank.updates) for rank in run.ranks)):
        of_ranks = []
        for rank in run.ranks:
            calls = [call for call in rank.training if call.updates == step]
            of_ranks.append([torch.cat([getattr(call, what) for call in calls]) for what in ("inputs", "outputs")])
        inputs, outputs = (torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*of_ranks, strict=True))
        found.append((inputs, outputs))
    return found


def first_wrong(run: Observed, right: Observed) -> str | None:
    """Return the first difference of a run from the right one."""
    found, wanted = steps(run), steps(right)
    if len(found) != len(wanted):
        return f"there are {len(found)} updates in {len(wanted)} steps"
    for step, ((inputs, outputs), (right_inputs, right_outputs)) in enumerate(zip(found, wanted, strict=True), 1):
        if not torch.equal(inputs, right_inputs):
            return f"the ranks train on other samples in step {step} than they did"
        if not (off := difference(outputs, right_outputs)) < CLOSE:
            after = "before any update" if step == 1 else f"after {step - 1} update(s)"
            return f"the outputs of the model {after} differ by {percent(off)} from those of one rank"
    loss, right_loss = run.epochs[-1]["val_loss"], right.epochs[-1]["val_loss"]
    if not math.isclose(loss, right_loss, rel_tol=1e-5):
        return f"the validation loss is {loss:.5f}; one rank with the same batches has {right_loss:.5f}"
    return None
