"""Samples that are slow to come, however little the machine computes: they are to be waited for several at a time.

The grader puts a slow file system of its own below the digits, and notes when each sample is waited for. How many are
waited for at once is what multiplies the samples per second, and no matter of how busy the machine is.
"""

import time
from collections.abc import Iterator

from clinic import coded
from clinic.loading import read_by
from clinic.observe import Script
from workshop.loaders import Loader
from workshop.loaders.images import Pictures

SAMPLES, BATCH, WORKERS = 64, 8, 8
SECONDS = 0.05
"""that the file system takes to give a sample"""
AT_ONCE = 3


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    noted = script.folder / "reads"
    noted.touch()

    def slow_file_system() -> None:
        read = Pictures.__getitem__

        def slow_read(digits: Pictures, index: int) -> tuple:
            begin = time.monotonic()
            time.sleep(SECONDS)
            with noted.open("a") as file:
                file.write(f"{begin} {time.monotonic()}\n")
            return read(digits, index)

        Pictures.__getitem__ = slow_read

    flags = ("--batch_size", BATCH, "--num_workers", WORKERS)
    how = {"train": SAMPLES, "val": BATCH}
    epochs = read_by(read_epochs, script, *flags, before=slow_file_system, **how)
    reads = [tuple(map(float, line.split())) for line in noted.read_text().splitlines()]
    together = sum(others(read, reads) >= AT_ONCE - 1 for read in reads)
    if together < len(reads) / 3:
        yield (
            f"with --num_workers {WORKERS}, samples are hardly waited for at the same time: {together} of {len(reads)} "
            f"together with {AT_ONCE - 1} or more others; so IO cannot be {AT_ONCE} times what one reader gives"
        )
    if any(sorted(epoch) != list(range(SAMPLES)) for epoch in epochs):
        yield f"an epoch of the loader does not have each of the {SAMPLES} samples once"
    elif (missing := SAMPLES * len(epochs) - len(reads)) > 0:
        yield f"in {len(epochs)} epochs, {missing} samples did not come from the file system, slow as it is"
    trained = script.run(*flags, "--epochs", 2, **how)[0].trained
    if sorted(trained) != sorted(2 * list(range(SAMPLES))):
        yield f"in two epochs, it does not train on each of the {SAMPLES} samples twice"
    elif trained[:SAMPLES] == trained[SAMPLES:]:
        yield "it trains on the samples in the same order in both epochs"


def read_epochs(loader: Loader) -> list[list[int]]:
    """Return the samples of each of two epochs."""
    epochs = []
    for epoch in (1, 2):
        loader.sampler.set_epoch(epoch)
        epochs.append([number for inputs, _ in loader for number in coded.numbers_of(inputs).tolist()])
    return epochs


def others(read: tuple[float, ...], reads: list[tuple[float, ...]]) -> int:
    """Return how many other samples are waited for in the middle of this ``read``."""
    middle = sum(read) / 2
    return sum(begin <= middle <= end for begin, end in reads) - 1
