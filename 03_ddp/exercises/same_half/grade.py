"""Two nodes with two ranks each: exactly one of the four ranks must get each sample."""

from collections.abc import Iterator
from itertools import combinations

from clinic.observe import Fault, Script

TRAIN, VAL = 320, 60


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run("--batch_size", 16, ranks=4, local_ranks=[0, 1, 0, 1], train=TRAIN, val=VAL)
    for a, b in combinations(range(4), 2):
        if both := set(run[a].trained) & set(run[b].trained):
            yield f"with two nodes of two ranks, ranks {a} and {b} trained on the same {len(both)} samples"
    seen = {sample for rank in run.ranks for sample in rank.trained}
    if len(seen) < TRAIN:
        yield f"of {TRAIN} samples, {TRAIN - len(seen)} were trained on by no rank"
    validated = sorted(sample for rank in run.ranks for sample in rank.validated)
    if len(set(validated)) < VAL:
        yield f"of {VAL} validation samples, {VAL - len(set(validated))} were seen by no rank"
    elif len(validated) > VAL:
        yield f"of {VAL} validation samples, some were seen by several ranks"
    try:
        script.run("--batch_size", 16, train=64, val=32)
    except Fault as fault:
        message = str(fault).removeprefix("the script ended with: ")
        yield f"a single process, which no launcher has started, ends with: {message}"
