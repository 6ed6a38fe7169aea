"""On two ranks, no sample that is validated on has been trained on, also when the run is stopped and resumed."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from clinic import coded
from clinic.observe import Observed, Script

BATCH, RANKS, EPOCHS, TRAIN = 16, 2, 2, 160
SHARES = 0.1, 0.3
"""of the samples may be held out: a split that decides sample by sample does not hold out exactly a fifth"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = train(script, EPOCHS)
    if wrong := list(faults_of(run)):
        yield from wrong
        return
    if any(torch.equal(a, b) for a, b in zip(*(rank.extra for rank in run.ranks), strict=False)):
        yield "the ranks train with the same random numbers, so dropout drops the same activations on both of them"
    first = train(script, 1)
    second = train(script, EPOCHS, "--resume", "true", run_dir=first.run_dir)
    for before, after, when in ((first, second, "before"), (second, first, "after")):
        if both := trained(before) & validated(after):
            yield (
                f"in a run that is resumed after its first epoch, {len(both)} of the samples that are validated on "
                f"were trained on {when} the stop"
            )
            break


def faults_of(run: Observed) -> Iterator[str]:
    """Yield what is wrong with the samples of a run that was not stopped."""
    held_out = validated(run)
    if foreign := {sample for sample in held_out if sample >= coded.FIRST_VAL}:
        yield f"{len(foreign)} of the samples that are validated on are no training samples that were held out"
        return
    for number, rank in enumerate(run.ranks):
        for other, its in enumerate(run.ranks):
            if both := set(rank.trained) & set(its.validated):
                yield f"rank {number} trained on {len(both)} of the samples that rank {other} validates on"
    if not SHARES[0] * TRAIN <= len(held_out) <= SHARES[1] * TRAIN:
        yield f"{len(held_out)} of {TRAIN} samples are held out for validation, not about a fifth of them"
    if any(count != EPOCHS for count in Counter(s for rank in run.ranks for s in rank.validated).values()):
        yield "not every sample that is held out is validated on once in each epoch"
    counts = Counter(s for rank in run.ranks for s in rank.trained)
    if twice := [sample for sample, count in counts.items() if count > EPOCHS]:
        yield f"{len(twice)} samples were trained on more than once in an epoch"
    used = sum(counts.values()) / EPOCHS
    if used <= TRAIN - len(held_out) - RANKS:  # fewer samples than ranks may be left over at the end of an epoch
        yield f"{TRAIN - len(held_out)} samples are not held out, but only {used:.0f} are trained on in an epoch"


def train(script: Script, epochs: int, *flags: object, run_dir: Path | None = None) -> Observed:
    """Train on two ranks."""
    flags = ("--batch_size", BATCH, "--epochs", epochs, *flags)
    return script.run(*flags, ranks=RANKS, train=TRAIN, val=40, run_dir=run_dir, watch=as_in_a_process_of_its_own)


def trained(run: Observed) -> set[int]:
    """Return the samples that any rank trained on."""
    return {sample for rank in run.ranks for sample in rank.trained}


def validated(run: Observed) -> set[int]:
    """Return the samples that any rank validated on."""
    return {sample for rank in run.ranks for sample in rank.validated}


def as_in_a_process_of_its_own(_: Path) -> Callable[[], list[torch.Tensor]]:
    """Give NumPy another seed on each rank, and note the state of PyTorch's generator before each training call."""
    np.random.seed()  # the ranks are forks of one process, so NumPy's generator would be in the same state on all
    states: list[torch.Tensor] = []

    def note(module: nn.Module, _: tuple) -> None:
        if isinstance(module, coded.SmallReader) and module.training and torch.is_grad_enabled():
            states.append(torch.get_rng_state())

    register_module_forward_pre_hook(note)
    return lambda: states
