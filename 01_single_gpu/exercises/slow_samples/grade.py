"""Samples that take long to arrive, however little the machine computes: several are to be waited for at a time.

The grader makes the archive's file system slower still, which is `time.sleep(0.002)` in the script, and notes when each
sample is waited for. The number of samples that are waited for at once is what multiplies the samples per second, no
matter how busy the machine is.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from clinic.notes import Rank
from clinic.observe import Script

SAMPLES, BATCH, WORKERS = 64, 8, 8
ARCHIVE_SECONDS = 0.002
"""that the script waits for each sample; nothing else here sleeps for exactly as long"""
SECONDS = 0.05
"""that it waits here"""
AT_ONCE = 3


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    noted = script.folder / "waits"
    noted.touch()
    flags = ("--batch_size", BATCH, "--num_workers", WORKERS, "--epochs", 2)
    # one validation sample only, because its waits are noted too
    rank = script.run(*flags, train=SAMPLES, val=1, watch=partial(note_waits, noted=noted))[0]
    trained = rank.trained
    waits = [tuple(map(float, line.split())) for line in noted.read_text().splitlines()]
    together = sum(others(wait, waits) >= AT_ONCE - 1 for wait in waits)
    if together < len(waits) / 3:
        yield (
            f"with --num_workers {WORKERS}, {together} of {len(waits)} samples were waited for at the same time as "
            f"{AT_ONCE - 1} others; for {AT_ONCE} times the throughput, nearly all must be"
        )
    elif 0 < (workers := processes(rank)) != WORKERS:
        yield f"with --num_workers {WORKERS}, {workers} processes load"
    else:
        rank = script.run("--batch_size", BATCH, "--num_workers", 1, train=2 * BATCH, val=1)[0]
        if (workers := processes(rank)) > 1:
            yield f"with --num_workers 1, {workers} processes load"
    if sorted(trained) != sorted(2 * list(range(SAMPLES))):
        yield f"in two epochs, it does not train on each of the {SAMPLES} samples twice"
    elif trained[:SAMPLES] == trained[SAMPLES:]:
        yield "it trains on the samples in the same order in both epochs"
    elif (missing := 2 * SAMPLES - len(waits)) > 0:
        yield f"in two epochs, {missing} samples did not come from the archive, for which it sleeps {ARCHIVE_SECONDS} s"


def processes(rank: Rank) -> int:
    """Return how many processes loaded training data in the first epoch; 0 if threads did."""
    before_validation = itertools.takewhile(lambda call: call.training, rank.shown)
    return max((len(call.children) for call in before_validation), default=0)


def note_waits(_: Path, noted: Path) -> Callable[[], None]:
    """Make the archive slower, and write into ``noted`` when it is waited for: a line with start and end each time."""
    sleep = time.sleep

    def slow_sleep(seconds: float) -> None:
        if seconds != ARCHIVE_SECONDS:
            sleep(seconds)
            return
        begin = time.monotonic()
        sleep(SECONDS)
        with noted.open("a") as file:
            file.write(f"{begin} {time.monotonic()}\n")

    time.sleep = slow_sleep
    return lambda: None


def others(wait: tuple[float, ...], waits: list[tuple[float, ...]]) -> int:
    """Return how many other samples are waited for in the middle of this ``wait``."""
    middle = sum(wait) / 2
    return sum(begin <= middle <= end for begin, end in waits) - 1
