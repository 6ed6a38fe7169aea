"""A trace: a few training steps on a time line, operator by operator, for ``--trace true``.

It is recorded by ``torch.profiler`` into a Chrome trace, which https://ui.perfetto.dev opens as it is, compressed.

Under Nsight Systems the same steps are recorded by that tool instead, if it was asked to wait for them:

    nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop -o train \\
        python train.py --trace true

Both read the GPU's activity through CUPTI, which serves one of them at a time.
"""

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, get_worker_info

from workshop.errors import warn
from workshop.loaders.sampler import Loader
from workshop.log import Log

SKIP, WARMUP, ACTIVE = 10, 2, 6
"""steps before the profiler starts, steps that it discards, and steps that it records"""
LOGGED_READS = 1000
"""maximum number of logged batches per worker, more than any worker reaches"""


class Trace(AbstractContextManager):
    """Traces some steps of the first epoch.

    The first steps are not typical: batches are waiting, libraries choose their algorithms, memory is allocated. In a
    short epoch, fewer of them are skipped. Then the profiler warms up, as starting it costs time of its own. The
    traced steps are slower than others, so a run with a trace is no measurement.

    As a context manager it makes sure that an unfinished trace is written even if training ends with an error.

    Args:
        folder: where the trace is written; made if it is not there.
        device: the device that trains.
        name: of the file, before ``.pt.trace.json.gz``; ranks that share a folder need different names.
        log: gets the lines for the user.
        show: gets the name and the figure (of matplotlib) of the plotted trace; None plots none.
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
        self._reads: LoggedReads | None = None
        self._stop = ExitStack()
        self._step = self._last = 0
        self._end_step: Callable[[], None] | None = None
        """what to do after each traced step; None: no trace is being recorded"""
        if device.type != "cuda":  # without a GPU, the profiler would log nothing but that
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End an unfinished trace and write it."""
        self._end_step = None
        try:
            self._stop.close()
        except (OSError, RuntimeError) as error:  # the disk is full, or the device has failed
            warn(f"the trace is lost: {error}")

    def start_epoch(self, loader: Loader) -> None:
        """Start to trace, if this is the first epoch; a step is the wait for a batch and what is done with it."""
        if not self._pending:
            return
        steps = len(loader) - loader.batch_sampler.start_step
        if steps <= WARMUP:
            self.log(f"no trace: the epoch has {steps} step(s), and the first {WARMUP} are to warm up")
            return
        self._pending = False
        skip = max(0, min(SKIP, steps - WARMUP - ACTIVE))
        self._first = skip + WARMUP + 1
        self._step, self._last = 1, min(skip + WARMUP + ACTIVE, steps)
        # Nsight Systems sets this variable for the programs that it starts.
        leave_to_nsys = self.device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ
        self._end_step = self._start_nsys() if leave_to_nsys else self._start_profiler(loader, skip)

    def end_step(self) -> None:
        """Go on to the next step, or end after the last one."""
        if self._end_step is None:
            return
        if self._step == self._last:
            self.close()
            return
        self._end_step()
        self._step += 1

    def _start_nsys(self) -> Callable[[], None]:
        """Return what to call after each step: it lets Nsight Systems begin its recording.

        The GPU works asynchronously, so the CPU waits for it at both ends: the recording has all work of its own steps,
        and no other. In it, the ranges of ``record_function`` and all operators are NVTX ranges.
        """
        self.log(f"leaving steps {self._first} to {self._last} to Nsight Systems")

        def end_step() -> None:
            if self._step == self._first - 1:
                torch.cuda.synchronize(self.device)
                self._stop.enter_context(torch.cuda.profiler.profile())
                self._stop.enter_context(emit_nvtx())
                self._stop.callback(torch.cuda.synchronize, self.device)  # the last to be added is called first

        return end_step

    def _start_profiler(self, loader: Loader, skip: int) -> Callable[[], None]:
        """Start the profiler and return what to call after each step."""
        if isinstance(loader, DataLoader) and loader.num_workers:
            self._reads = LoggedReads(loader.dataset, loader.num_workers)
            with suppress(AttributeError):  # of a data set that can have no attributes, such as a list
                loader.dataset.__getitems__ = self._reads  # PyTorch's name for what reads all samples of a batch
                self._stop.callback(delattr, loader.dataset, "__getitems__")
        on_cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        profiler = profile(
            activities=[ProfilerActivity.CPU, *on_cuda],
            schedule=schedule(skip_first=skip, wait=0, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )
        profiler.start()
        self._stop.callback(profiler.stop)
        return profiler.step

    def _write(self, profiler: profile) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.file))
        if self._reads:
            add_workers(self.file, self._reads)
        steps = f"steps {self._first} to {self._step}"
        self.log(f"traced {steps}: {self.file}, for https://ui.perfetto.dev")
        on_cuda = self.device.type == "cuda"
        self.log(f"{'GPU' if on_cuda else 'CPU'} time by operator")
        clock = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        self.log(profiler.key_averages().table(sort_by=clock, row_limit=12, max_name_column_width=40))
        if self.show:
            from workshop.profiling.timeline import plot_traces  # here: training does not need matplotlib

            self.show("trace", plot_traces({steps: self.file}))


def tracing(log: Log) -> AbstractContextManager:
    """Return the context in which ``--trace true`` traces some steps; without the flag it does nothing.

    Each rank writes its own file; rank 0 plots its trace.
    """
    if not log.config.trace or log.config.benchmark:
        return nullcontext()
    rank = log.ranks.rank
    show = log.add_figure if rank == 0 else None
    trace = Trace(log.folder.path, log.ranks.device, name=f"rank{rank}", log=log.print, show=show)
    log.instruments.append(trace)
    return trace


class LoggedReads:
    """What loader workers call to read a batch while a trace is recorded: it logs when they began and ended.

    A class, because workers that are not forked get it pickled, which a function within a function cannot be.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:  # noqa: ANN401
        self.dataset = dataset
        self.times = torch.zeros(num_workers, LOGGED_READS, 2, dtype=torch.int64).share_memory_()
        """start and end of the first batches of each worker in ns, 0 where there is none; all processes share it"""
        self.count = 0
        """batches that this worker has read; each worker has a copy of its own"""

    def __call__(self, keys: list) -> list:
        """Return the samples of a batch."""
        began = time.time_ns()
        of_batch = getattr(type(self.dataset), "__getitems__", None)  # the class has it if it reads whole batches
        samples = of_batch(self.dataset, keys) if of_batch else [self.dataset[key] for key in keys]
        worker = get_worker_info()
        if worker and self.count < LOGGED_READS:
            self.times[worker.id, self.count] = torch.tensor([began, time.time_ns()])
            self.count += 1
        return samples


def add_workers(trace: Path, reads: LoggedReads) -> None:
    """Add to a Chrome trace when each worker prepared a batch."""
    with gzip.open(trace, "rt") as lines:
        content = json.load(lines)
    zero = content.get("baseTimeNanoseconds", 0)
    for worker, times in enumerate(reads.times):
        event = {"ph": "X", "cat": "loader_worker", "name": f"worker {worker}", "pid": "loader", "tid": worker}
        for began, ended in times[times[:, 1] > 0].tolist():
            content["traceEvents"].append(event | {"ts": (began - zero) / 1000, "dur": (ended - began) / 1000})
    with gzip.open(trace, "wt") as lines:
        json.dump(content, lines)
