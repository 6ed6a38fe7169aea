"""Two ranks must make the same updates as one process with the batches of both, and so keep equal weights."""

from collections.abc import Iterator

import torch

from clinic.runs import Script, difference, percent

FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01, "--dropout", "false")
DATA = {"train": 160, "val": 32}
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    alone = script.run(*FLAGS, **DATA)[0]
    run = script.run(*FLAGS, **DATA, ranks=2)
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
    elif not (off := difference(run[0].updates[-1].gradient, alone.updates[-1].gradient)) < 10 * CLOSE:
        yield f"in the last update, the gradient differs by {percent(off)} from that of one process"
    measured = script.run(*FLAGS, "--benchmark", "true", "--benchmark_seconds", 0.01, **DATA, ranks=2)
    if not (off := difference(*(rank.updates[0].gradient for rank in measured.ranks))) < CLOSE:
        yield f"with --benchmark true, the first gradients of the two ranks differ by {percent(off)}"
    silent = script.run(*FLAGS, "--sync_gradients", "false", **DATA, ranks=2)
    if difference(*(rank.updates[0].gradient for rank in silent.ranks)) < CLOSE:
        yield "with --sync_gradients false, the ranks still exchange gradients: it no longer measures what that costs"
