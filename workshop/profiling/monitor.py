"""How busy the machine is while it trains, for ``--monitor true``: a thread that samples once a second.

Its values are hints, not measurements: utilization says that something ran, not that it ran efficiently.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import psutil
import torch

from workshop.errors import warn
from workshop.hardware import available_cpus, processes
from workshop.log import Log
from workshop.profiling.nvml import Gpu

SHORTEST = 0.1
"""seconds between two samples: the CPU time of a process is counted in ticks of 10 ms, GPM counters need 100 ms"""
TIMEOUT = 5.0
"""seconds: with a GPU that has failed, a call to NVML may never return"""


class Monitor:
    """Samples CPUs, memory and GPU in a thread of its own while its context lasts.

    It never fails a run: what goes wrong here ends the monitoring with one warning, and the summary says so.
    A run shorter than the interval gets one sample, at its end. The quantities are those of `workshop.profiling.nvml`
    and

    - ``cpu_percent``: CPU time since the last sample, as a share of the time of all CPUs that this process may use
    - ``rss_bytes``: resident memory of the `processes`
    - ``system_memory_bytes``: memory in use on the whole machine, by everyone

    Args:
        device: the device that trains; where it is an NVIDIA GPU, the counters of all that this process uses are read
            too. Names begin with "gpu" for the first of them; for the others its number follows, such as "gpu2".
        add: is called, from the thread, with the name of a quantity (which ends in its unit), its value, and the
            seconds since the start.
        interval: seconds between samples.
    """

    def __init__(
        self, device: torch.device, add: Callable[[str, float, float], None] | None = None, interval: float = 1.0
    ) -> None:
        self.device = device
        self.add = add or (lambda name, value, seconds: None)
        self.interval = interval
        self._samples = 0
        self._statistics: dict[str, tuple[int, float, float]] = {}  # count, sum and largest of the values so far
        self._left_out: dict[str, str] = {}
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        # Here, because another thread has another "current device".
        visible = range(torch.cuda.device_count() if self.device.type == "cuda" else 0)
        self._uuids = {number: str(torch.cuda.get_device_properties(number).uuid) for number in visible}
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        if self._thread.is_alive():
            self._fail(f"no answer for {TIMEOUT:.0f} s")

    def summary(self) -> dict[str, Any]:
        """Return number of samples, mean and max of each quantity, which ones are missing and why, and what failed."""
        statistics = dict(self._statistics)  # a copy, because the thread goes on
        return {
            "samples": self._samples,
            "quantities": {name: {"mean": total / n, "max": top} for name, (n, total, top) in statistics.items()},
            "left_out": dict(self._left_out),
            "failure": self._failure,
        }

    def table(self) -> str:
        """Return mean and max of each quantity, for the terminal."""
        summary = self.summary()
        lines = [f"{'monitor, ' + str(summary['samples']) + ' samples':32} {'mean':>18} {'max':>18}"]
        for name, value in summary["quantities"].items():
            unit, digits = (1e9, 2) if name.endswith("bytes") else (1, 1)
            figures = (f"{value[kind] / unit:18,.{digits}f}" for kind in ("mean", "max"))
            lines.append(f"{name.replace('bytes', 'GB'):32} {' '.join(figures)}")
        return "\n".join(lines)

    def _sample_until_stopped(self) -> None:
        try:
            gpus = self._open_gpus()
            self._started = self._time = time.perf_counter()
            self._cpu_seconds, _ = processes()
            while not self._stop.wait(self.interval):
                self._sample(gpus)
            time.sleep(SHORTEST)  # the last interval may have been shorter
            self._sample(gpus)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _open_gpus(self) -> dict[int, Gpu]:
        gpus = {}
        for number, uuid in self._uuids.items():
            try:
                gpus[number] = Gpu(uuid)
            except Exception as error:  # no NVML, or too old for this: the CPUs can still be monitored
                self._left_out["gpu"] = str(error)
        return gpus

    def _sample(self, gpus: dict[int, Gpu]) -> None:
        values = self._read_cpus()
        used = [number for number in gpus if torch.cuda.memory_reserved(number)]
        for number in used:
            for name, value in gpus[number].read().items():
                values[name if number == used[0] else f"gpu{number}_{name.removeprefix('gpu_')}"] = value
            self._left_out |= gpus[number].left_out
        self._samples += 1
        for name, value in values.items():
            count, total, largest = self._statistics.get(name, (0, 0.0, value))
            self._statistics[name] = count + 1, total + value, max(largest, value)
            self.add(name, value, self._time - self._started)

    def _read_cpus(self) -> dict[str, float]:
        now, (cpu_seconds, rss) = time.perf_counter(), processes()
        elapsed, used = now - self._time, cpu_seconds - self._cpu_seconds
        self._time, self._cpu_seconds = now, cpu_seconds
        # A process that ends at this moment may count twice or not at all: so not less than 0, and not more than all
        # CPUs can do.
        used = min(max(0.0, used), elapsed * (psutil.cpu_count() or 1))
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": 100 * used / (elapsed * available_cpus()),
            "rss_bytes": float(rss),
            "system_memory_bytes": float(memory.total - memory.available),
        }

    def _fail(self, reason: str) -> None:
        self._failure = reason
        warn(f"monitoring has ended, training goes on: {reason}")


@contextmanager
def monitoring(log: Log) -> Iterator[None]:
    """With ``--monitor true``, monitor the machine on rank 0 while the context lasts."""
    if not log.config.monitor or log.ranks.rank != 0:
        yield
        return
    monitor = Monitor(log.ranks.device, lambda name, value, at: log.add("monitor", {name: value}, round(at)))
    log.folder.monitor = monitor.summary
    try:
        with monitor:
            yield
    finally:
        log.print(monitor.table())
    if log.folder.epochs and not log.config.benchmark:
        log.folder.write_summary()  # once more, with the last sample
