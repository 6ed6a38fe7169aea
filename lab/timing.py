"""How long a computation takes: warm, repeated, on a known number of CPU threads."""

import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from workshop.hardware import available_cpus
from workshop.profiling.calibration import repeats_for

SHORTEST_BLOCK = 0.002
"""seconds that one reading of the clock must span, so that the clock's own cost (about 100 ns) does not show"""
FEWEST_REPEATS = 3
"""repeats of even the slowest computation: fewer have no spread"""


@dataclass(frozen=True)
class Timing:
    """What one call takes, in seconds: the median of the repeats, and their interquartile range as the spread."""

    seconds: float
    spread: float
    repeats: int


def measure(run: Callable[[], Any], min_seconds: float) -> Timing:
    """Call ``run`` again and again, for at least ``min_seconds`` seconds and three repeats.

    ``run`` must have been called once before, so that loading libraries, compiling and the first allocation are not
    counted, and must return only when its result is there: accelerators work asynchronously.

    Median and interquartile range are those of ``torch.utils.benchmark.Timer.blocked_autorange``. It is not used here,
    for three reasons: it sets the number of torch's threads itself, while the experiments set that of numpy's libraries
    too; it may measure a slow computation only once; and with a GPU it synchronizes in measurements of the CPU as well.
    """
    timer = timeit.Timer(run)
    calls = repeats_for(SHORTEST_BLOCK, timer.timeit, first=1)
    blocks: list[float] = []
    while len(blocks) < FEWEST_REPEATS or sum(blocks) < min_seconds:
        blocks.append(timer.timeit(calls))
    low, median, high = statistics.quantiles(blocks, n=4, method="inclusive")
    return Timing(seconds=median / calls, spread=(high - low) / calls, repeats=len(blocks))


def cpu_share() -> float:
    """Return the share of the CPUs' time that this process gets if it wants all: 1 where nobody else computes."""
    cpus, matrix = available_cpus(), torch.ones(512, 512)
    with threadpool_limits(cpus):
        matrix @ matrix  # starts the threads
        started, started_cpu = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - started) < 0.3:
            matrix @ matrix
        return (time.process_time() - started_cpu) / elapsed / cpus
