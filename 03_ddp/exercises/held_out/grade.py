"""On two ranks, no sample that is validated on has been trained on, also when the run is stopped and resumed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from clinic import coded
from clinic.runs import Observed, Script

BATCH, RANKS, EPOCHS, TRAIN = 16, 2, 2, 160
SHARES = 0.1, 0.3
"""of the samples may be held out: a split that decides sample by sample does not hold out exactly a fifth"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = train(script)
    for faults in (faults_of_split(run), faults_of_use(run)):
        if wrong := list(faults):
            yield from wrong
            return
    steps = len(run[0].training) // EPOCHS
    first = train(script, stop_after=steps + 1)  # in the second epoch
    second = train(script, "--resume", "true", run_dir=first.run_dir)
    for before, after, when, then in ((first, second, "before", "after"), (second, first, "after", "before")):
        if both := trained(before) & validated(after):
            yield (
                f"in a run that is stopped after its first epoch and resumed, {len(both)} of the samples that are "
                f"validated on {then} the stop are trained on {when} it"
            )
            break


def faults_of_split(run: Observed) -> Iterator[str]:
    """Yield which samples are validated on that should not be."""
    held_out = validated(run)
    if foreign := {sample for sample in held_out if sample >= coded.FIRST_VAL}:
        yield f"{len(foreign)} samples of the test set are validated on, and no training samples are held out"
    for number, rank in enumerate(run.ranks):
        for other, its in enumerate(run.ranks):
            if both := set(rank.trained) & set(its.validated):
                whom = "it validates on itself" if number == other else f"rank {other} validates on"
                yield f"rank {number} trains on {len(both)} of the {len(set(its.validated))} samples that {whom}"
    if not SHARES[0] * TRAIN < len(held_out) <= SHARES[1] * TRAIN:
        yield f"{len(held_out)} of {TRAIN} samples are validated on, not about a fifth of them"


def faults_of_use(run: Observed) -> Iterator[str]:
    """Yield whether samples are left out, or used more than once in an epoch."""
    held_out = validated(run)
    counts = Counter(sample for rank in run.ranks for sample in rank.validated)
    if any(count != EPOCHS for count in counts.values()):
        yield "some of the samples that are held out are validated on more or less than once in an epoch"
    counts = Counter(sample for rank in run.ranks for sample in rank.trained)
    if twice := [sample for sample, count in counts.items() if count > EPOCHS]:
        yield f"{len(twice)} samples are trained on more than once in an epoch"
    others, used = TRAIN - len(held_out), sum(counts.values()) / EPOCHS
    if used <= others - RANKS:  # at the end of an epoch, fewer samples than ranks may be left over
        yield f"{others} of {TRAIN} samples are not held out, but only {used:.0f} of them are trained on in an epoch"


def train(script: Script, *flags: object, run_dir: Path | None = None, stop_after: int | None = None) -> Observed:
    """Train on two ranks."""
    flags = ("--batch_size", BATCH, "--epochs", EPOCHS, *flags)
    return script.run(*flags, ranks=RANKS, train=TRAIN, val=40, run_dir=run_dir, stop_after=stop_after)


def trained(run: Observed) -> set[int]:
    """Return the samples that any rank trained on."""
    return {sample for rank in run.ranks for sample in rank.trained}


def validated(run: Observed) -> set[int]:
    """Return the samples that any rank validated on."""
    return {sample for rank in run.ranks for sample in rank.validated}
