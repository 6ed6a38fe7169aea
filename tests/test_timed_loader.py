"""Load and compute time are measured separately, over a window of steps, with a clock that only the test moves."""

from collections.abc import Iterator

import pytest
from torch.profiler import ProfilerActivity, profile

from workshop.profiling import timed_loader
from workshop.profiling.timed_loader import TimedLoader


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_loader, "time", clock)
    return clock


def slow_loader(clock: Clock, seconds: list[float]) -> Iterator[int]:
    for step, duration in enumerate(seconds):
        clock.now += duration
        yield step


def test_load_and_compute_are_measured_separately_over_the_window(clock: Clock) -> None:
    loader = TimedLoader(slow_loader(clock, [8.0, 2.0, 4.0]), window=2)
    means = []
    for step in loader:
        clock.now += [10.0, 20.0, 40.0][step]
        means.append(loader.means())
    assert means == [(8.0, 10.0), (5.0, 15.0), (3.0, 30.0)]
    assert loader.step == 3


def test_time_after_the_means_were_read_still_counts(clock: Clock) -> None:
    loader = TimedLoader(slow_loader(clock, [1.0, 1.0]), window=5)
    for _ in loader:
        clock.now += 2.0
        loader.means()
        clock.now += 2.0
    assert loader.means()[0] == 1.0
    assert loader._compute[0] == 4.0


def test_same_batches() -> None:
    assert list(TimedLoader([3, 1, 2], window=2)) == [3, 1, 2]


def test_errors_of_the_loader_pass_through() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        list(TimedLoader(broken(), window=2))


def test_each_wait_is_a_range_in_a_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert list(TimedLoader([3, 1, 2], window=2)) == [3, 1, 2]
    assert [event.name for event in profiler.events()].count("data") == 4  # the last wait finds that there are no more
