"""Two ranks must make the same updates as one process with the batches of both, and so keep equal weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from clinic.observe import Script, percent

FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01)
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    alone = script.run(*FLAGS, train=160, val=32, watch=without_dropout)[0]
    run = script.run(*FLAGS, train=160, val=32, ranks=2, watch=without_dropout)
    steps = [len(alone.updates), *(len(rank.updates) for rank in run.ranks)]
    if len(set(steps)) > 1:
        numbers = " and ".join(map(str, steps[1:]))
        yield f"one process made {steps[0]} updates; with the same global batch, two ranks made {numbers}"
        return
    for number, rank in enumerate(run.ranks):
        off = difference(rank.updates[0].gradient, alone.updates[0].gradient)
        if not off < CLOSE:
            yield (
                f"without dropout, the first gradient that the optimizer gets on rank {number} differs by "
                f"{percent(off)} from that of one process with the same global batch"
            )
    flat = [torch.cat([weight.double().flatten() for weight in rank.weights.values()]) for rank in run.ranks]
    if not (off := difference(*flat)) < CLOSE:
        yield f"at the end, the weights of the two ranks differ by {percent(off)}"
    elif not (off := difference(rank.updates[-1].gradient, alone.updates[-1].gradient)) < 10 * CLOSE:
        yield f"in the last update, the gradient differs by {percent(off)} from that of one process"
    measured = script.run(*FLAGS, "--benchmark", "true", "--benchmark_seconds", 0.01, ranks=2, train=160, val=32)
    first = [rank.updates[0].gradient for rank in measured.ranks]
    if not (off := difference(*first)) < CLOSE:
        yield f"with --benchmark true, the first gradients of the two ranks differ by {percent(off)}"


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def without_dropout(_: Path) -> Callable[[], None]:
    """Turn dropout off, because it differs between the ranks, as it should."""
    F.dropout = lambda input, *_, **__: input
    return lambda: None
