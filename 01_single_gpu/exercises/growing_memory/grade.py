"""A data set that every worker ends up with a copy of: it is to be in memory once, however many workers there are.

Measured is the memory that belongs to a worker alone: pages that it shares with the training process do not count. What
a worker needs for itself is measured with fewer samples, so what is left over is due to the data.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from clinic.coded import SmallReader
from clinic.runs import Script

FEW, MANY, BATCH, WORKERS, EPOCHS = 640, 3200, 64, 3, 4
ALLOWED = 6e6
"""bytes by which the memory of two workers may grow; the additional samples are 8e6 as floats in one array"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    own = {}
    for samples in (FEW, MANY):
        flags = ("--batch_size", BATCH, "--num_workers", WORKERS, "--epochs", EPOCHS, "--limit_train", samples)
        watch = partial(measure_memory, steps_per_epoch=samples // BATCH)
        rank = script.run(*flags, train=MANY, val=1, watch=watch)[0]
        processes = min((len(call.children) for call in rank.training), default=0)
        if processes < WORKERS:
            yield f"with --num_workers {WORKERS}, {processes} processes load the training data"
            return
        if max(rank.trained) >= samples:
            yield "the model gets other images than in the script as `start` wrote it; are they scaled as before?"
            return
        epochs = [rank.trained[samples * epoch :][:samples] for epoch in range(EPOCHS)]
        if any(sorted(epoch) != list(range(samples)) for epoch in epochs):
            yield f"an epoch does not train on each of the {samples} samples once"
        if epochs[0] == epochs[1]:
            yield "two epochs have the samples in the same order"
        own[samples] = rank.extra
    if (grows := own[MANY] - own[FEW]) > ALLOWED:
        yield (
            f"with {MANY} samples instead of {FEW}, the memory of which each worker has a copy of its own is larger by "
            f"{grows / 2e6:.0f} MB after {EPOCHS} epochs"
        )


def measure_memory(_: Path, steps_per_epoch: int) -> Callable[[], float]:
    """Measure the most memory that the workers do not share with others in the last steps of an epoch.

    The process that has most is left out: it may be one that holds the data for all others.
    """
    most = 0.0
    steps = 0

    def before_forward(module: nn.Module, _: tuple) -> None:
        nonlocal most, steps
        if not isinstance(module, SmallReader) or not module.training:
            return
        steps += 1
        if steps % steps_per_epoch in (steps_per_epoch - 1, 0):
            workers = sorted(not_shared(process) for process in psutil.Process().children(recursive=True))
            most = max(most, sum(workers[:-1]))

    register_module_forward_pre_hook(before_forward)
    return lambda: most


def not_shared(process: psutil.Process) -> float:
    """Return the memory of a process in bytes that it does not share with any other process."""
    with contextlib.suppress(psutil.Error):
        return float(process.memory_full_info().uss)
    return 0.0  # it has just ended
