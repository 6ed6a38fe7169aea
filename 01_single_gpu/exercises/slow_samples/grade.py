"""Samples of an archive that is read as a whole for each of them: it is to be read only now and then.

What the processes read is counted by Linux, for each of them, whichever function reads. So it does not matter how the
digits are stored, and how busy the machine is.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from clinic.coded import SmallReader
from clinic.observe import Script

SAMPLES, BATCH, WORKERS, EPOCHS = 1920, 64, 2, 2
IMAGE_BYTES = 28 * 28
ALLOWED = 25
"""times the size of the archive that may be read: to make it, once in each process and epoch, and whatever a format of
files reads beside the samples; once for each batch would be 60 times"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    if not hasattr(psutil.Process, "io_counters"):
        yield "this system does not say how much a process reads, so this exercise cannot be checked here; Linux does"
        return
    flags = ("--batch_size", BATCH, "--num_workers", WORKERS, "--epochs", EPOCHS)
    rank = script.run(*flags, train=SAMPLES, val=1, watch=count_bytes_read)[0]
    epochs = [rank.trained[SAMPLES * epoch :][:SAMPLES] for epoch in range(EPOCHS)]
    if any(sorted(epoch) != list(range(SAMPLES)) for epoch in epochs):
        yield f"an epoch does not train on each of the {SAMPLES} samples once"
        return
    if epochs[0] == epochs[1]:
        yield "two epochs have the samples in the same order"
    before_validation = itertools.takewhile(lambda call: call.training, rank.shown)
    if (processes := max(len(call.children) for call in before_validation)) != WORKERS:
        yield f"with --num_workers {WORKERS}, {processes} processes load the training data"
    if (times := rank.extra / (SAMPLES * IMAGE_BYTES)) > ALLOWED:
        yield (
            f"in {EPOCHS} epochs of {SAMPLES} samples with {WORKERS} workers, all processes together read "
            f"{times:,.0f} times as many bytes as there are in the archive"
        )


def count_bytes_read(_: Path) -> Callable[[], float]:
    """Return what returns how many bytes this process and its workers have read since now; see `Script.run`.

    A worker's are counted up to the last call of the model: it may end before the script does.
    """
    own = psutil.Process()
    before = own.io_counters().read_chars
    read: dict[int, int] = {}

    def after_forward(module: nn.Module, *_: object) -> None:
        if isinstance(module, SmallReader):
            for process in own.children(recursive=True):
                try:
                    read[process.pid] = process.io_counters().read_chars
                except psutil.Error:  # it has just ended
                    continue

    register_module_forward_hook(after_forward)
    return lambda: float(own.io_counters().read_chars - before + sum(read.values()))
