"""A data set that every worker ends up with a copy of: it is to be in memory once, however many workers there are.

Looked at is proportional memory: a page that several processes share counts once, divided among them. What a worker
needs for itself is measured with few samples, so what is left over is due to the data.
"""

import contextlib
from collections.abc import Iterator

import psutil

from clinic import coded
from clinic.loading import read_by
from clinic.observe import Script
from workshop.loaders import Loader

FEW, MANY, BATCH, WORKERS, EPOCHS = 64, 1600, 32, 3, 2
ALLOWED = 20e6
"""bytes by which the workers may add to the memory of `MANY` samples; as floats in one array, they are 5e6"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    taken = {}
    for samples in (FEW, MANY):
        for workers in (0, WORKERS):
            flags = ("--batch_size", BATCH, "--num_workers", workers)
            memory, processes, epochs = read_by(memory_of, script, *flags, train=samples, val=BATCH)
            if processes < workers:
                yield f"with --num_workers {workers}, {processes} processes load"
                return
            if any(sorted(epoch) != list(range(samples)) for epoch in epochs):
                yield f"with --num_workers {workers}, an epoch does not have each of the {samples} samples once"
            if epochs[0] == epochs[1]:
                yield "two epochs have the samples in the same order"
            taken[samples, workers] = memory
    grows = {workers: taken[MANY, workers] - taken[FEW, workers] for workers in (0, WORKERS)}
    if (added := grows[WORKERS] - grows[0]) > ALLOWED:
        yield (
            f"{MANY} samples take {grows[0] / 1e6:.0f} MB with no workers. With {WORKERS}, they "
            f"take {added / 1e6:.0f} MB more after two epochs, beside what each worker needs anyway"
        )


def memory_of(loader: Loader) -> tuple[float, int, list[list[int]]]:
    """Return the most memory that this process and its workers take, how many these are, and each epoch's samples."""
    most, processes, epochs = 0.0, 0, []
    for epoch in range(1, EPOCHS + 1):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for step, (inputs, _) in enumerate(loader, 1):
            epochs[-1] += coded.numbers_of(inputs).tolist()
            if step in (len(loader) - 1, len(loader)):
                workers = psutil.Process().children(recursive=True)
                processes = max(processes, len(workers))
                most = max(most, sum(proportional(process) for process in [psutil.Process(), *workers]))
    return most, processes, epochs


def proportional(process: psutil.Process) -> float:
    """Return the memory of a process, where pages that others share count in part (on macOS: not at all)."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return getattr(memory, "pss", memory.uss)
    return 0.0  # it has just ended
