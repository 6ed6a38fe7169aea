"""A data set that every worker ends up with a copy of: it is to be in memory once, however many workers there are.

Measured is proportional memory: a page that several processes share counts once, divided among them. What a worker
needs for itself is measured with few samples, so what is left over is due to the data.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from clinic.coded import SmallReader
from clinic.observe import Script

FEW, MANY, BATCH, WORKERS, EPOCHS = 64, 1600, 32, 3, 2
ALLOWED = 20e6
"""bytes by which the workers may add to the memory of `MANY` samples; as floats in one array, they are 5e6"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    taken = {}
    for samples in (FEW, MANY):
        for workers in (0, WORKERS):
            flags = ("--batch_size", BATCH, "--num_workers", workers, "--epochs", EPOCHS)
            watch = partial(measure_memory, steps_per_epoch=samples // BATCH)
            rank = script.run(*flags, train=samples, val=1, watch=watch)[0]
            processes = max((len(call.children) for call in rank.shown if call.training), default=0)
            if processes < workers:
                yield f"with --num_workers {workers}, {processes} processes load"
                return
            epochs = [rank.trained[:samples], rank.trained[samples:]]
            if any(sorted(epoch) != list(range(samples)) for epoch in epochs):
                yield f"with --num_workers {workers}, an epoch does not train on each of the {samples} samples once"
            if epochs[0] == epochs[1]:
                yield "two epochs have the samples in the same order"
            taken[samples, workers] = rank.extra
    grows = {workers: taken[MANY, workers] - taken[FEW, workers] for workers in (0, WORKERS)}
    if (added := grows[WORKERS] - grows[0]) > ALLOWED:
        yield (
            f"{MANY} samples take {grows[0] / 1e6:.0f} MB with no workers. With {WORKERS}, they "
            f"take {added / 1e6:.0f} MB more after two epochs, beside what each worker needs anyway"
        )


def measure_memory(_: Path, steps_per_epoch: int) -> Callable[[], float]:
    """Measure the most memory that this process and its workers take in the last steps of an epoch."""
    most = 0.0
    steps = 0

    def before_forward(module: nn.Module, _: tuple) -> None:
        nonlocal most, steps
        if not isinstance(module, SmallReader) or not module.training:
            return
        steps += 1
        if steps % steps_per_epoch in (steps_per_epoch - 1, 0):
            workers = psutil.Process().children(recursive=True)
            most = max(most, sum(proportional(process) for process in [psutil.Process(), *workers]))

    register_module_forward_pre_hook(before_forward)
    return lambda: most


def proportional(process: psutil.Process) -> float:
    """Return the memory of a process, where pages that others share count in part (on macOS: not at all)."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return getattr(memory, "pss", memory.uss)
    return 0.0  # it has just ended
