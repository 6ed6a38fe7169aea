"""A loader as slow as one likes, on a clock of its own."""

from collections.abc import Iterator

import pytest
import torch
from workshop.distributed.ranks import ONE_PROCESS

from workshop.loaders.sampler import EpochOrder

SLOW, FAST = 0.004, 0.0002


class Clock:
    """Stands in for the module time: it goes on only where somebody sleeps, so no busy machine decides a test."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("workshop.profiling.throughput.time", clock)
    return clock


class SlowLoader:
    def __init__(self, clock: Clock, seconds: float, samples: int) -> None:
        self.clock = clock
        self.seconds = seconds
        self.sampler = EpochOrder(samples, 8, ONE_PROCESS, seed=1, shuffle=True)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.sampler.batches():
            self.clock.sleep(self.seconds)
            yield batch, batch

    def __len__(self) -> int:
        return len(self.sampler)
