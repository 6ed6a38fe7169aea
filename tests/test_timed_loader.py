"""Load and compute time are measured separately, over a window of steps, with a clock that only the test moves."""

from collections.abc import Iterator

import pytest

from slow_work import Clock
from workshop.profiling import timed_loader
from workshop.profiling.timed_loader import TimedLoader


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_loader, "time", clock)
    return clock


def slow_loader(clock: Clock, seconds: list[float]) -> Iterator[int]:
    for step, duration in enumerate(seconds):
        clock.sleep(duration)
        yield step


def test_load_and_compute_are_measured_separately_over_the_window(clock: Clock) -> None:
    loader = TimedLoader(slow_loader(clock, [8.0, 2.0, 4.0]), window=2)
    means = []
    for step in loader:
        clock.sleep([10.0, 20.0, 40.0][step])
        means.append(loader.means())
    assert means == [(8.0, 10.0), (5.0, 15.0), (3.0, 30.0)]


def test_time_after_the_means_were_read_still_counts(clock: Clock) -> None:
    loader = TimedLoader(slow_loader(clock, [1.0, 1.0]), window=5)
    means = []
    for _ in loader:
        clock.sleep(2.0)
        means.append(loader.means())
        clock.sleep(4.0)
    assert means == [(1.0, 2.0), (1.0, 4.0)]


def test_batches_and_errors_of_the_loader_pass_through() -> None:
    def broken() -> Iterator[int]:
        yield from [3, 1]
        raise RuntimeError("worker died")

    batches = iter(TimedLoader(broken(), window=2))
    assert (next(batches), next(batches)) == (3, 1)
    with pytest.raises(RuntimeError, match="worker died"):
        next(batches)
