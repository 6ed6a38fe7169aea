"""Samples of an archive that is read as a whole for each of them: what a sample costs must not depend on its size.

What the processes read is counted by Linux, for each of them, whichever function reads. So it does not matter how the
digits are stored, and how busy the machine is. A format of files may read some more than a sample; HDF5 does. Therefore
two archives are compared, of which one is larger. The labels are too short for this: NumPy is asked how often it has
read an array of an archive.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from clinic.coded import SmallReader
from clinic.runs import Fault, Script

FEW, MANY, BATCH, WORKERS, EPOCHS = 160, 640, 8, 2, 2
BYTES = 28 * 28 + 8
"""of an image and its label"""
ALLOWED = 0.12
"""of what is added to the archive may be read in addition for each sample; HDF5 reads 0.07 of it, because it reads some
neighbors of a sample too, and an archive that is read once for each batch 0.24"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    if not hasattr(psutil.Process, "io_counters"):
        yield "this system does not say how much a process reads, so this exercise cannot be checked here; Linux does"
        return
    try:
        yield from read_by(script, WORKERS)
    except Fault as fault:  # most often a file that several workers share; without workers, the fault itself shows
        yield str(fault)
        with suppress(Fault):
            yield from read_by(script, 0)


def read_by(script: Script, workers: int) -> Iterator[str]:
    """Yield what is wrong with the samples of a run with this number of workers, and with what it reads for each."""
    read = {}
    for samples in (FEW, MANY):
        flags = ("--batch_size", BATCH, "--num_workers", workers, "--epochs", EPOCHS)
        rank = script.run(*flags, train=samples, val=1, watch=count_reads)[0]
        epochs = [rank.trained[samples * epoch :][:samples] for epoch in range(EPOCHS)]
        if any(sorted(epoch) != list(range(samples)) for epoch in epochs):
            yield f"an epoch does not train on each of the {samples} samples once"
            return
        if epochs[0] == epochs[1]:
            yield "two epochs have the samples in the same order"
            return
        before_validation = itertools.takewhile(lambda call: call.training, rank.shown)
        if (processes := max(len(call.children) for call in before_validation)) != workers:
            yield f"with --num_workers {workers}, {processes} processes load the training data"
            return
        bytes_read, arrays_read = rank.extra
        read[samples] = bytes_read / (EPOCHS * samples)
    if read[MANY] - read[FEW] > ALLOWED * (MANY - FEW) * BYTES:
        yield (
            f"with --num_workers {workers} and {MANY} digits in the archive instead of {FEW}, "
            f"{'the processes read' if workers else 'the script reads'} {read[MANY] / 1000:,.0f} kB for each sample "
            f"instead of {read[FEW] / 1000:,.0f} kB"
        )
    elif arrays_read > MANY / 8:
        yield f"in {EPOCHS} epochs of {MANY} digits, a whole array is read from the archive {arrays_read} times"


def count_reads(_: Path) -> Callable[[], tuple[float, int]]:
    """Return what returns how many bytes this process and its workers have read since now, and how many arrays.

    A worker's bytes are counted up to the last call of the model: it may end before the script does.
    """
    own = psutil.Process()
    before = own.io_counters().read_chars
    read: dict[int, int] = {}
    arrays = multiprocessing.Value("i", 0)
    own_getitem = np.lib.npyio.NpzFile.__getitem__

    def after_forward(module: nn.Module, *_: object) -> None:
        if isinstance(module, SmallReader):
            for process in own.children(recursive=True):
                try:
                    read[process.pid] = process.io_counters().read_chars
                except psutil.Error:  # it has just ended
                    continue

    def getitem(file: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
        with arrays.get_lock():
            arrays.value += 1
        return own_getitem(file, name)

    register_module_forward_hook(after_forward)
    np.lib.npyio.NpzFile.__getitem__ = getitem
    return lambda: (float(own.io_counters().read_chars - before + sum(read.values())), arrays.value)
