"""How busy the machine is while it trains, for ``--monitor true``: a thread that samples once a second.

Its values are hints, not measurements: utilization says that something ran, not that it ran efficiently.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import psutil
import torch

from workshop.errors import warn
from workshop.hardware import available_cpus
from workshop.profiling.nvml import Gpu

# The CPU time of a process is counted in ticks of 10 ms, and GPM counters need 100 ms between two samples.
SHORTEST_INTERVAL = 0.1
PSS_PAUSE = 50  # times as long as it took to read the proportional memory, until it is read again
TIMEOUT = 5.0  # seconds; with a GPU that has failed, a call to NVML may never return

LogSample = Callable[[str, float, float], None]


class ProcessTree:
    """What this process and the processes that it has started (loader workers) use of the machine.

    - ``cpu_percent``: CPU time since the `read` before, as a share of that of the CPUs this process may use
    - ``rss_bytes``: their resident memory; pages that processes share, as those of a dataset loaded before the workers
      were started, count once for each
    - ``pss_bytes``: their proportional memory; of a page that N processes share, each counts an Nth. Linux walks
      through all pages for it, so it is left out of as many samples as it takes to spend at most 2 % of the time on it.
    - ``system_memory_bytes``: memory in use on the whole machine, by everyone
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpus = available_cpus()
        self._time, self._cpu_seconds = time.perf_counter(), self._read_processes()[0]
        self._pss_due = 0.0
        self.left_out: dict[str, str] = {}
        """what this system does not show, and why"""

    def read(self) -> dict[str, float]:
        """Return the present value of every quantity."""
        now, (cpu_seconds, rss) = time.perf_counter(), self._read_processes()
        elapsed, used = now - self._time, cpu_seconds - self._cpu_seconds
        # A process that ends at this moment may count twice or not at all: so not less than 0, and not more than all
        # CPUs can do.
        used = min(max(0.0, used), elapsed * (psutil.cpu_count() or 1))
        self._time, self._cpu_seconds = now, cpu_seconds
        memory = psutil.virtual_memory()
        values = {"cpu_percent": 100 * used / (elapsed * self._cpus), "rss_bytes": float(rss)}
        if now >= self._pss_due and not self.left_out:
            values |= self._read_pss()
            finished = time.perf_counter()
            self._pss_due = finished + PSS_PAUSE * (finished - now)
        return values | {"system_memory_bytes": float(memory.total - memory.available)}

    def _read_pss(self) -> dict[str, float]:
        pss = 0
        for process in [*self._process.children(recursive=True), self._process]:
            try:
                pss += process.memory_full_info().pss
            except psutil.NoSuchProcess:  # it has just ended
                continue
            except (psutil.AccessDenied, AttributeError):
                self.left_out["pss_bytes"] = "this system does not show it"
                return {}
        return {"pss_bytes": float(pss)}

    def _read_processes(self) -> tuple[float, int]:
        """Return the CPU seconds that the processes have used since their start, and their resident bytes."""
        cpu_seconds, rss = 0.0, 0
        for process in [*self._process.children(recursive=True), self._process]:
            try:
                times = process.cpu_times()
                rss += process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
            # The time of a process that has ended is added to children_user and children_system of its parent.
            cpu_seconds += times.user + times.system + times.children_user + times.children_system
        return cpu_seconds, rss


class Monitor:
    """Samples CPUs, memory and GPU in a thread of its own while its context lasts.

    It never fails a run: what goes wrong here ends the monitoring with one warning, and the summary says so.
    A run shorter than the interval gets one sample, at its end.

    Args:
        device: the device that trains; where it is an NVIDIA GPU, the counters of all that this process uses are read
            too. Names of quantities of the first begin with "gpu" as a rule, those of the third with "gpu2".
        log: is called, from the thread, with the name of a quantity (which ends in its unit), its value, and the
            seconds since the start.
        interval: seconds between samples, 0.1 or more.
    """

    def __init__(self, device: torch.device, log: LogSample | None = None, interval: float = 1.0) -> None:
        self.device = device
        self.log = log or (lambda name, value, seconds: None)
        self.interval = max(interval, SHORTEST_INTERVAL)
        self._samples = 0
        self._statistics: dict[str, tuple[int, float, float]] = {}  # count, sum and largest of the values so far
        self._left_out: dict[str, str] = {}
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        try:
            self._processes = ProcessTree()
            # Here, because another thread has another "current device".
            visible = range(torch.cuda.device_count() if self.device.type == "cuda" else 0)
            self._uuids = {number: str(torch.cuda.get_device_properties(number).uuid) for number in visible}
            self._thread.start()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join(TIMEOUT)
        if self._thread.is_alive():
            self._fail(f"no answer for {TIMEOUT:.0f} s")

    def summary(self) -> dict[str, Any]:
        """Return number of samples, mean and max of each quantity, which ones are missing and why, and what failed."""
        with self._lock:
            return {
                "interval_seconds": self.interval,
                "samples": self._samples,
                "quantities": {
                    name: {"mean": total / n, "max": top} for name, (n, total, top) in self._statistics.items()
                },
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
        gpus: dict[int, Gpu] = {}
        try:
            self._open(gpus)
            stopping = False
            while not stopping:
                sampled = time.perf_counter()
                stopping = self._stop.wait(self.interval)
                time.sleep(max(0.0, sampled + SHORTEST_INTERVAL - time.perf_counter()))
                self._sample(gpus)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            for gpu in gpus.values():
                with contextlib.suppress(Exception):
                    gpu.close()

    def _open(self, gpus: dict[int, Gpu]) -> None:
        for number, uuid in self._uuids.items():
            try:
                gpus[number] = Gpu(uuid)
            except Exception as error:  # no NVML, or too old for this: the CPUs can still be monitored
                self._left_out["gpu"] = str(error)

    def _sample(self, gpus: dict[int, Gpu]) -> None:
        values = self._processes.read()
        used = [number for number in gpus if torch.cuda.memory_reserved(number)]
        for number in used:
            for name, value in gpus[number].read().items():
                values[name if number == used[0] else f"gpu{number}_{name.removeprefix('gpu_')}"] = value
        seconds = time.perf_counter() - self._started
        with self._lock:
            self._samples += 1
            self._left_out |= self._processes.left_out
            for number in used:
                self._left_out |= gpus[number].left_out
            for name, value in values.items():
                count, total, largest = self._statistics.get(name, (0, 0.0, -math.inf))
                self._statistics[name] = count + 1, total + value, max(largest, value)
        for name, value in values.items():
            self.log(name, value, seconds)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        warn(f"monitoring has ended, training goes on: {reason}")
