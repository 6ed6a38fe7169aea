"""Load and compute time are told apart, over a window of steps."""

import time
from collections.abc import Iterator

import pytest

from workshop.profiling.timed import TimedLoader


class SlowLoader:
    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[int]:
        for step, seconds in enumerate(self.seconds):
            time.sleep(seconds)
            yield step


def test_load_and_compute_are_told_apart() -> None:
    timed = TimedLoader(SlowLoader([0.03] * 4), window=4)
    for _ in timed:
        time.sleep(0.01)
        load, compute = timed.means()
        assert load >= 0.03
        assert 0.01 <= compute < load
    assert timed.step == 4


def test_only_the_window_counts() -> None:
    timed = TimedLoader(SlowLoader([0.2, 0.0, 0.0]), window=2)
    for _ in timed:
        pass
    load, _ = timed.means()
    assert load < 0.1


def test_same_batches() -> None:
    assert list(TimedLoader([3, 1, 2], window=2)) == [3, 1, 2]


def test_errors_of_the_loader_pass_through() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        list(TimedLoader(broken(), window=2))
