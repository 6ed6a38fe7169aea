"""How long a computation takes, and how much trials differ.

trials = alternately({"map": lambda: speed("map"), "memory": lambda: speed("memory")}, rounds=3)
rows = [[name, mean_std(found)] for name, found in trials.items()]   # cells for lab/results.py
median_range(ratios(trials["map"], trials["memory"]))
"""

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")
SHORTEST_BLOCK = 0.002
"""seconds that one reading of the clock must span, so that the clock's own cost (about 100 ns) does not show"""
FEWEST_REPEATS = 3
"""repeats of even the slowest computation: fewer have no spread"""


def alternately(configurations: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Measure each configuration once per round, one after the other; return the results of each.

    So a machine whose speed drifts slows all configurations alike, and trials of one round can be compared as pairs.
    """
    found: dict[K, list[T]] = {name: [] for name in configurations}
    for _ in range(rounds):
        for name, measure_once in configurations.items():
            found[name].append(measure_once())
    return found


def mean_std(trials: Sequence[float]) -> list[float]:
    """Return mean and standard deviation: a cell of a table, shown as ±."""
    return [statistics.mean(trials), statistics.stdev(trials)]


def median_range(trials: Sequence[float]) -> list[float]:
    """Return median, lowest and highest: a cell of a table, shown with the range in brackets."""
    return [statistics.median(trials), min(trials), max(trials)]


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratio ``other`` / ``base`` of each round."""
    return [b / a for a, b in zip(base, other, strict=True)]


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
    """
    timer, calls = timeit.Timer(run), 1
    while timer.timeit(calls) < SHORTEST_BLOCK:
        calls *= 2
    blocks: list[float] = []
    while len(blocks) < FEWEST_REPEATS or sum(blocks) < min_seconds:
        blocks.append(timer.timeit(calls))
    low, median, high = statistics.quantiles(blocks, n=4, method="inclusive")
    return Timing(seconds=median / calls, spread=(high - low) / calls, repeats=len(blocks))


def cpu_share() -> float:
    """Return the share of all CPUs' time that this process gets under full load: 1 on an idle machine."""
    import torch
    from threadpoolctl import threadpool_limits

    from workshop.hardware import available_cpus

    cpus, matrix = available_cpus(), torch.ones(512, 512)
    with threadpool_limits(cpus):
        matrix @ matrix  # starts the threads
        started, started_cpu = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - started) < 0.3:
            matrix @ matrix
        return (time.process_time() - started_cpu) / elapsed / cpus
