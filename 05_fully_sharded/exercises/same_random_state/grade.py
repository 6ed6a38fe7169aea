"""On each rank, a resumed run continues with the random numbers of a run that was never stopped."""

from collections.abc import Iterator

import torch

from clinic.observe import Observed, Script
from clinic.sharded import note_steps

FLAGS = ("--model", "mnist_cnn", "--shard", "root", "--optimizer", "sgd", "--batch_size", 8)
TRAIN = 32
"""samples; two steps in each epoch"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for form in ("whole", "sharded"):
        if found := list(faults(script, form)):
            yield f"with --checkpoint_form {form}, {found[0]}"
            return


def faults(script: Script, form: str) -> Iterator[str]:
    """Yield a line for each thing that is still wrong with one form of checkpoint."""
    whole = run(script, form, 2)
    first = run(script, form, 1)
    resumed = run(script, form, 2, first)
    steps = [len(rank.extra.steps) for rank in (*whole.ranks, *resumed.ranks)]
    if steps != [4, 4, 2, 2]:
        where = ("without a stop, rank 0", "without a stop, rank 1", "resumed, rank 0", "resumed, rank 1")
        made = ", ".join(f"{name}: {number}" for name, number in zip(where, steps, strict=True))
        yield f"a run of two epochs must make 4 steps on each rank, and one resumed after the first epoch 2 ({made})"
        return
    expected, found = (states(some, step) for some, step in ((whole, 2), (resumed, 0)))
    if torch.equal(expected[0], expected[1]):
        yield "the two ranks have equal random states even without a stop"
    elif torch.equal(found[0], found[1]):
        yield "after a stop and a resume, the two ranks have equal random states, so that dropout is equal on both"
    elif wrong := [rank for rank in (0, 1) if not torch.equal(found[rank], expected[rank])]:
        ranks = "both ranks" if len(wrong) == 2 else f"rank {wrong[0]}"
        beginning = states(whole, 0)
        again = all(torch.equal(found[rank], beginning[rank]) for rank in wrong)
        what = "the random numbers of its first step again" if again else "other random numbers than without the stop"
        yield f"after a stop and a resume, {ranks} got {what}"


def run(script: Script, form: str, epochs: int, before: Observed | None = None) -> Observed:
    """Run the script for some epochs, from the beginning or where another run ended."""
    flags = (*FLAGS, "--epochs", epochs, "--checkpoint_form", form, *(("--resume", "true") if before else ()))
    run_dir = before.run_dir if before else None
    return script.run(*flags, ranks=2, train=TRAIN, val=8, notes=False, watch=note_steps, run_dir=run_dir)


def states(run: Observed, step: int) -> list[torch.Tensor]:
    """Return the random state of each rank before a step."""
    found = [rank.extra.steps[step].random_state for rank in run.ranks]
    return [state for state in found if state is not None]
