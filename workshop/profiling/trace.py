"""A trace: a few training steps on a time line, operator by operator, for ``--trace true``.

It is recorded by ``torch.profiler`` into a Chrome trace, which https://ui.perfetto.dev opens as it is, compressed. The
name ends in ``.pt.trace.json.gz`` because TensorBoard's PyTorch profiler plugin looks for that; the plugin itself has
been abandoned and was removed from its repository in 2026 (https://github.com/pytorch/kineto/pull/1284).

Under Nsight Systems the same steps are recorded by that tool instead, if it was asked to wait for them:

    nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop -o train \\
        python train.py --trace true

Both read the GPU's activity through CUPTI, which serves one of them at a time.
"""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import emit_nvtx
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from workshop.errors import warn
from workshop.loaders.worker import WORKER_TIMES

Batch = TypeVar("Batch")
SKIP, WARMUP, ACTIVE = 10, 2, 6
"""steps before the profiler starts, steps that it discards, and steps that it records"""


class Trace(AbstractContextManager):
    """Traces some steps of the first epoch; the batches of later epochs pass through unchanged.

    The first steps are not typical: batches are waiting, libraries choose their algorithms, memory is allocated. In a
    short epoch, fewer of them are skipped. Then the profiler warms up, as starting it costs time of its own. The
    traced steps are slower than others, so a run with a trace is no measurement.

    As a context manager it makes sure that an unfinished trace is written even if training ends with an error.

    Args:
        folder: where the trace is written; made if it is not there.
        device: the device that trains.
        name: of the file, before ``.pt.trace.json.gz``; ranks that share a folder need different names.
        log: gets the lines for the user.
        show: gets a figure of the trace; None makes none.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        name: str = "rank0",
        log: Callable[[str], None] = print,
        show: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.file = folder / f"{name}.pt.trace.json.gz"
        self.device = device
        self.log = log
        self.show = show
        self._pending = True
        self._step = 0
        self._stop = ExitStack()
        if device.type != "cuda":  # without a GPU, the profiler would log nothing but that
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    def __exit__(self, *exception: object) -> None:
        self.close()

    def traced(self, batches: Iterable[Batch], steps: int) -> Iterator[Batch]:
        """Iterate over one epoch of ``steps`` batches; fetching a batch and what is done with it make one step."""
        return self._trace(batches, steps) if self._pending else iter(batches)

    def close(self) -> None:
        """End an unfinished trace and write it."""
        try:
            self._stop.close()
        except (OSError, RuntimeError) as error:  # the disk is full, or the device has failed
            warn(f"the trace is lost: {error}")

    def _trace(self, batches: Iterable[Batch], steps: int) -> Iterator[Batch]:
        self._pending = False
        if steps <= WARMUP:
            self.log(f"no trace: the epoch has {steps} step(s), and the first {WARMUP} are to warm up")
            yield from batches
            return
        skip = max(0, min(SKIP, steps - WARMUP - ACTIVE))
        self._first = skip + WARMUP + 1
        self._last = min(skip + WARMUP + ACTIVE, steps)
        with self:
            recorder = self._start(skip)
            for self._step, batch in enumerate(batches, start=1):
                yield batch
                if self._step < self._last:
                    recorder.step()
                else:
                    self.close()

    def _start(self, skip: int) -> "profile | _NsysWindow":
        self._stop.callback(self._log_if_nothing)
        on_cuda = self.device.type == "cuda"
        if on_cuda and under_nsys():
            self.log(f"leaving steps {self._first} to {self._last} to Nsight Systems")
            recorder = _NsysWindow(self._first, self.device)
        else:
            recorder = profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU],
                schedule=schedule(skip_first=skip, wait=0, warmup=WARMUP, active=ACTIVE, repeat=1),
                on_trace_ready=self._write,
            )
            self._workers = Path(self._stop.enter_context(tempfile.TemporaryDirectory()))
            self._stop.callback(os.environ.pop, WORKER_TIMES)
            os.environ[WORKER_TIMES] = str(self._workers)  # the workers that the first batch starts inherit it
        recorder.start()
        self._stop.callback(recorder.stop)
        return recorder

    def _write(self, profiler: profile) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.file))
        add_workers(self.file, self._workers)
        steps = self._step - self._first + 1
        planned = "" if steps == ACTIVE else f" ({ACTIVE} were planned)"
        self.log(f"traced steps {self._first} to {self._step}{planned}: {self.file}, for https://ui.perfetto.dev")
        self.log(top_operators(profiler, self.device, steps))
        if self.show:
            from workshop.profiling.timeline import plot_traces  # here: training does not need matplotlib

            self.show("trace", plot_traces({f"steps {self._first} to {self._step}": self.file}))

    def _log_if_nothing(self) -> None:
        if self._step < self._first:
            self.log(f"no trace: training ended in step {self._step}, tracing was to start with step {self._first}")


def under_nsys() -> bool:
    """Return whether Nsight Systems records this process; it sets this variable for the programs that it starts."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


class _NsysWindow:
    """Starts and stops the recording of Nsight Systems; has the interface of ``torch.profiler.profile``.

    The GPU works asynchronously, so the CPU waits for it at both ends: the window contains all work of its own steps,
    and no other. Within it, the ranges of ``record_function`` and all operators are NVTX ranges.
    """

    def __init__(self, first: int, device: torch.device) -> None:
        self.steps_before = first - 1
        self.device = device
        self.ranges = emit_nvtx()

    def start(self) -> None:
        self.done = 0

    def step(self) -> None:
        self.done += 1
        if self.done == self.steps_before:
            torch.cuda.synchronize(self.device)
            self.ranges.__enter__()
            torch.cuda.profiler.start()

    def stop(self) -> None:
        if self.done >= self.steps_before:
            torch.cuda.synchronize(self.device)
            torch.cuda.profiler.stop()
            self.ranges.__exit__(None, None, None)


def add_workers(trace: Path, folder: Path) -> None:
    """Add to a Chrome trace when each loader worker prepared a batch, as they logged it in ``folder``."""
    with gzip.open(trace, "rt") as lines:
        content = json.load(lines)
    zero = content.get("baseTimeNanoseconds", 0)
    for number, file in enumerate(sorted(folder.iterdir())):
        for began, ended in (map(int, line.split()) for line in file.read_text().splitlines()):
            event = {"ph": "X", "cat": "loader_worker", "name": file.name, "pid": "loader", "tid": number}
            content["traceEvents"].append(event | {"ts": (began - zero) / 1000, "dur": (ended - began) / 1000})
    with gzip.open(trace, "wt") as lines:
        json.dump(content, lines)


def top_operators(profiler: profile, device: torch.device, steps: int, rows: int = 12) -> str:
    """Return a table of the operators and ranges that took most of the traced ``steps``.

    Time is self time, without that of the operators called in turn: on CUDA that of the kernels an operator launched,
    elsewhere that on the CPU. So each microsecond counts once, and the shares are those of the whole. A CUDA graph
    launches kernels without their operators: those are rows of their own.
    """
    where, clock = ("GPU", "self_device_time_total") if device.type == "cuda" else ("CPU", "self_cpu_time_total")
    operators = [
        (getattr(event, clock), event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CPU and not event.key.startswith("ProfilerStep")
    ]
    if where == "GPU":
        operators += kernels_without_operator(profiler.events())
    total = sum(microseconds for microseconds, _, _ in operators)
    if not total:
        return f"the trace has no {where} time: this PyTorch cannot record it here"
    lines = [f"{f'{where} time by operator':40}  calls/step  ms/step   share"]
    for microseconds, count, name in sorted(operators, reverse=True)[:rows]:
        milliseconds = microseconds / 1000 / steps
        lines.append(f"{name[:40]:40}  {count / steps:10.1f}  {milliseconds:7.2f}  {microseconds / total:6.1%}")
    return "\n".join(lines)


def kernels_without_operator(events: Sequence[FunctionEvent]) -> list[tuple[float, int, str]]:
    """Return microseconds, number and name of the kernels, and copies, that no operator among the events launched.

    Variants of one template are one kernel here, by the name before its arguments.
    """
    on_gpu = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    kernels = [(event.name, event.time_range.elapsed_us(), 1) for event in on_gpu if not event.is_user_annotation]
    kernels += [(kernel.name, -kernel.duration, -1) for event in events for kernel in event.kernels]
    microseconds, count = Counter[str](), Counter[str]()
    for name, duration, one in kernels:
        name = name.removeprefix("void ").partition("<")[0]
        microseconds[name] += duration
        count[name] += one
    return [(microseconds[name], count[name], name) for name in count if count[name] > 0]
