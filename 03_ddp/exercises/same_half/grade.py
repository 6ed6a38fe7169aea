"""Two nodes with two ranks each, started by torchrun or by srun: exactly one of the four ranks must get each sample."""

from collections.abc import Iterator
from itertools import combinations

from clinic.runs import Fault, Observed, Script

TRAIN, VAL = 320, 60


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    flags = ("--batch_size", 16)
    for launcher in ("torchrun", "srun"):
        where = f"with two nodes of two ranks, started by {launcher}"
        try:
            run = script.run(*flags, ranks=4, local_ranks=[0, 1, 0, 1], launcher=launcher, train=TRAIN, val=VAL)
        except Fault as fault:
            yield f"{where}, {fault}"
            return
        if wrong := list(wrong_shares(run)):
            yield from (f"{where}, {line}" for line in wrong[:3])
            return
    try:
        script.run(*flags, train=64, val=32)
    except Fault as fault:
        yield f"a single process, which no launcher has started: {fault}"


def wrong_shares(run: Observed) -> Iterator[str]:
    """Yield which samples do not go to exactly one rank."""
    for a, b in combinations(range(4), 2):
        if both := set(run[a].trained) & set(run[b].trained):
            yield f"ranks {a} and {b} trained on the same {len(both)} samples"
    if unseen := TRAIN - len({sample for rank in run.ranks for sample in rank.trained}):
        yield f"{unseen} of {TRAIN} samples were trained on by no rank"
    validated = [sample for rank in run.ranks for sample in rank.validated]
    if unseen := VAL - len(set(validated)):
        yield f"{unseen} of {VAL} validation samples were seen by no rank"
    elif len(validated) > VAL:
        yield f"some of {VAL} validation samples were seen by several ranks"
