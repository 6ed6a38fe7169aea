"""Time spent waiting for data and time spent on everything else, step by step."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.profiler import record_function

Batch = TypeVar("Batch")
END: Any = object()


class TimedLoader(Generic[Batch]):
    """Iterate over a loader and keep the load time and the compute time of the last ``window`` steps.

    Nothing here waits for the device: on an accelerator the compute time of one step is the time to *launch* it. The
    loop catches up with the device where it reads a value from it, so the mean over all steps since the last such read
    is true; with ``window`` equal to the log interval, that is what the log shows.
    """

    def __init__(self, loader: Iterable[Batch], window: int) -> None:
        self.loader = loader
        self._load = deque[float](maxlen=window)
        self._compute = deque[float](maxlen=window)
        self._step_started = 0.0

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        asked = time.perf_counter()
        while True:
            with record_function("data"):  # the name of this wait in a profiler
                batch = next(batches, END)
            if batch is END:
                return
            self._step_started = time.perf_counter()
            self._load.append(self._step_started - asked)
            self._compute.append(0.0)
            yield batch
            asked = time.perf_counter()
            self._compute[-1] = asked - self._step_started

    def means(self) -> tuple[float, float]:
        """Return the moving averages (load, compute) in seconds a step; the step under way counts up to now."""
        self._compute[-1] = time.perf_counter() - self._step_started
        return sum(self._load) / len(self._load), sum(self._compute) / len(self._compute)
