"""The clock of ``--clock``: this process's launches take the time of a GPU, and its clocks show simulated time.

In the first updates, Python sees each operation with its shapes, computes how long it would take (`durations`), and
tells the compiled library, for each launch that the operation makes (native/durations.cpp). From then on no Python code
of the null GPU runs in an operation, so the host needs the time that it needs without the clock. native/clock.cpp has
the queues of the streams, copies and collectives.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import atexit
import ctypes
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.data import dataloader

from . import compiled, library
from .durations import Durations, name_of
from .interface import Settings
from .updates import call_after_updates, time_the_loaders

FEWEST, MOST = 2, 12
"""updates in which operations are observed: until one has brought no kernel that was new, within these limits"""
OPERATIONS, TRIALS = 200, 8
"""how many operations, and how often, the overhead of observing is measured with"""


class Clock:
    """What this process's clock knows beside what the compiled library knows."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.durations = settings, Durations(settings)
        self.library = library.load()
        self.library.nullgpu_now.restype = ctypes.c_double
        self.library.nullgpu_go.argtypes = self.library.nullgpu_leave_out.argtypes = [ctypes.c_double]
        self.library.nullgpu_operation_lasts.argtypes = [ctypes.c_double, ctypes.c_char_p]
        self.library.nullgpu_end.restype, self.library.nullgpu_end.argtypes = ctypes.c_double, [ctypes.c_void_p]
        self.overhead = self.overhead_on_cpu = 0.0
        """seconds that observing costs in each operation, which a script without it would not need"""
        self.updates: list[float] = []
        """the simulated times of their ends"""
        self.loading: list[tuple[float, float]] = []
        """between which times the loop waited for a batch"""
        self.began: tuple[float, float] | None = None
        """real and simulated time when the GPU was used first"""
        self.observed = Observed(self)

    def now(self) -> float:
        """Return the simulated time."""
        return self.library.nullgpu_now()

    def put_compiled(self, name: str, moved: float, products: bool, launch: Callable[[], Any]) -> Any:
        """Launch a kernel of Triton that moves so many bytes."""
        self.library.nullgpu_operation_begins()
        try:
            result = launch()
        finally:
            self.library.nullgpu_operation_ends()
        seconds = self.durations.of_compiled(name, moved, products)
        self.library.nullgpu_operation_lasts(seconds, name.encode())
        return result

    def update_ended(self) -> None:
        """Note when the GPU, not the host, has ended an update."""
        self.updates.append(self.library.nullgpu_end(torch.cuda.current_stream().cuda_stream))
        self.observed.update_ended()


class Observer(TorchDispatchMode):
    """Tells the library how long each operation of a thread lasts."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: PyTorch asks this, and would otherwise run all operations one by one."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and tell how long it lasts."""
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor and not issubclass(kind, torch.nn.Parameter) for kind in types):
            # While the compiler traces, tensors have shapes only; the parts of a DTensor and the like come here again.
            traced = any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in types)
            return func(*args, **kwargs) if traced else NotImplemented
        clock, native = self.clock, self.clock.library
        native.nullgpu_operation_begins()
        try:
            out = func(*args, **kwargs)
        finally:
            launches = native.nullgpu_operation_ends()
        if not launches:
            native.nullgpu_leave_out(clock.overhead_on_cpu)
            return out
        native.nullgpu_stop()
        name, seconds = name_of(func), 0.0
        try:
            seconds = clock.durations.of(func, args, kwargs, out, launches)
        finally:
            native.nullgpu_go(clock.overhead)
        # Not while the clock stands: the host waits here if the queue is full.
        native.nullgpu_operation_lasts(seconds, name.encode())
        return out


class Observed:
    """The updates in which operations are observed: the first ones, as long as they bring kernels that are new."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.observer = clock, Observer(clock)
        self.is_on = False
        self.updates = self.kernels = 0
        self.thread = 0

    def begin(self) -> None:
        """Observe the operations of this thread, of its backward passes, and of threads that begin from now on."""
        self.is_on, self.thread = True, threading.get_ident()
        self.observer.__enter__()
        run = threading.Thread.run

        def observed(thread: threading.Thread) -> None:
            # Threads that stay, as those of loaders and of pools do, would be slowed forever.
            module = getattr(getattr(thread, "_target", None), "__module__", None) or ""
            if thread.daemon or module.startswith("concurrent.") or not self.is_on:
                return run(thread)
            with Observer(self.clock):
                return run(thread)

        setattr(threading.Thread, "run", observed)  # noqa: B010

        def end() -> None:
            setattr(threading.Thread, "run", run)  # noqa: B010

        self.restore = end

    def update_ended(self) -> None:
        """Stop observing if the last update has brought nothing new."""
        if not self.is_on:
            return
        self.updates += 1
        before, self.kernels = self.kernels, self.clock.library.nullgpu_known_kernels()
        if self.updates < FEWEST or (self.kernels > before and self.updates < MOST):
            return
        if threading.get_ident() != self.thread or _get_current_dispatch_mode() is not self.observer:
            return  # the script has entered a mode of its own, or updates weights in another thread: later
        self.is_on = False
        self.observer.__exit__(None, None, None)
        self.restore()
        compiled.stop()
        self.clock.library.nullgpu_forget_counts()


def install(settings: Settings) -> None:
    """Begin: this process's operations take their time, and its clocks show simulated time."""
    clock = Clock(settings)
    call_after_updates(clock.update_ended)
    dataloader.DataLoader.__iter__ = without_modes(clock, dataloader.DataLoader.__iter__)  # it starts the workers
    dataloader._BaseDataLoaderIter.__next__ = without_modes(clock, dataloader._BaseDataLoaderIter.__next__)
    time_the_loaders(clock.now, lambda began, ended: clock.loading.append((began, ended)))
    real = {name: getattr(time, name) for name in ("time", "perf_counter", "monotonic")}
    offsets = {name: function() - clock.now() for name, function in real.items()}
    for name, offset in offsets.items():
        setattr(time, name, lambda offset=offset: offset + clock.now())

    def both() -> tuple[float, float]:
        return real["perf_counter"](), clock.now()

    def first_use() -> None:
        measure_overhead(clock, real["perf_counter"])
        clock.durations.forget()
        clock.observed.begin()
        clock.began = both()

    torch.cuda._lazy_call(first_use)
    compiled.install(clock.put_compiled)
    if folder := os.environ.get("NULLGPU_CLOCK"):
        atexit.register(lambda: write(clock, folder, both()))


def without_modes(clock: Clock, function: Any) -> Any:
    """Return a function whose operations are not observed, so that it slows no loader and no worker."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not clock.observed.is_on:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def measure_overhead(clock: Clock, perf_counter: Callable[[], float]) -> None:
    """Measure what observing costs in each operation, so that it can be left out of the host's time.

    The first updates do not count, but a loop without updates is observed to its end.
    """
    host, launch = clock.settings.host_speed, clock.settings.launch

    def fastest(x: torch.Tensor, now: Callable[[], float]) -> float:
        """Return the seconds of an operation in the trial that was disturbed least."""
        trials = []
        for _ in range(TRIALS):
            began = now()
            for _ in range(OPERATIONS):
                x.add_(1)
            trials.append((now() - began) / OPERATIONS)
        return min(trials)

    def simulated() -> float:  # without the time in which the clock stood, but as fast as this host
        return clock.now() * host

    on_gpu, on_cpu = torch.zeros(16, device="cuda"), torch.zeros(16)
    plain, plain_on_cpu = fastest(on_gpu, perf_counter), fastest(on_cpu, perf_counter)
    with Observer(clock):
        clock.overhead = max(0.0, fastest(on_gpu, simulated) - launch * host - plain)
        clock.overhead_on_cpu = max(0.0, fastest(on_cpu, simulated) - plain_on_cpu)


def write(clock: Clock, folder: str, ended: tuple[float, float]) -> None:
    """Write what the report needs; ``ended`` is the real and the simulated time."""
    if not torch.cuda.is_initialized() or clock.began is None:
        return
    rank = int(os.environ.get("RANK") or 0)
    clock.library.nullgpu_spans(f"{folder}/spans{rank}.tsv".encode())
    launches, of_other_sizes = ctypes.c_int64(), ctypes.c_int64()
    clock.library.nullgpu_count_launches(ctypes.byref(launches), ctypes.byref(of_other_sizes))
    whole = sum(clock.durations.by.values()) or 1.0
    found = {
        "updates": clock.updates,
        "observed": clock.observed.updates,
        "is_observed": clock.observed.is_on,
        "loading": clock.loading,
        "launches": launches.value,
        "of_other_sizes": of_other_sizes.value,
        "unknown": unknown(clock, folder) | dict.fromkeys(sorted(clock.durations.unknown), 0),
        "known_by": {by: seconds / whole for by, seconds in clock.durations.by.items()},
        "real": ended[0] - clock.began[0],
        "simulated": ended[1] - clock.began[1],
    }
    with open(f"{folder}/clock{rank}.json", "w") as file:
        json.dump(found, file)


def unknown(clock: Clock, folder: str) -> dict[str, int]:
    """Return the kernels that were never observed, and how often they were launched, the most frequent first."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        clock.library.nullgpu_unknown(file.name.encode())
        rows = [line.rstrip("\n").split("\t") for line in Path(file.name).read_text().splitlines()]
    return {name: int(count) for count, name in sorted(rows, key=lambda row: -int(row[0]))}
