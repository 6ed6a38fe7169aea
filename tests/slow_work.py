"""A loader of chosen speed, on a simulated clock."""

from collections.abc import Iterator

import pytest
import torch

from workshop.loaders.sampler import DistributedBatchSampler

SLOW, FAST = 0.004, 0.0002


class Clock:
    """Replaces the module time: it advances only in `sleep`, so the load of the machine does not change a result."""

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
        self.dataset = range(samples)
        self.batch_sampler = DistributedBatchSampler(samples, 8, shuffle=True, seed=1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.batch_sampler.batches():
            self.clock.sleep(self.seconds)
            yield batch, batch

    def __len__(self) -> int:
        return len(self.batch_sampler)
