"""How long operations would take on a GPU, and what the GPU would have waited for: the clock of ``--clock``.

The time of an operation is the larger one of its arithmetic and its memory traffic, with a share of the peak that such
operations attain, and at least some microseconds for each kernel. (A roofline: Williams, Waterman and Patterson 2009,
https://doi.org/10.1145/1498765.1498785.) native/clock.cpp has the queues of the streams, copies and collectives.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import atexit
import ctypes
import functools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch.utils.data import dataloader
from torch.utils.flop_counter import flop_registry

from . import compiled, library
from .interface import Settings
from .updates import call_after_updates, time_the_loaders

ATTAINED = {"matmul": 0.65, "conv": 0.35, "attention": 0.40, "memory": 0.62}
"""share of the peak, or of the memory's bandwidth, that large operations of a kind attain"""
SHORTEST = 2.5e-6
"""seconds of the shortest kernel"""
RAMP = 1e-5
"""seconds that an operation with arithmetic takes beside it: a small one does not fill a GPU (assumed, not fitted)"""
KINDS = {"mm": "matmul", "addmm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "_scaled_mm": "matmul"}
CALIBRATED, TRIALS = 200, 8
"""operations, and how often, with which the overhead of the mode is measured"""


def kind_of(name: str) -> str:
    """Return the kind of an operation with a known number of FLOPs."""
    if "convolution" in name:
        return "conv"
    return "attention" if "attention" in name else KINDS.get(name, "matmul")


class Clock(TorchDispatchMode):
    """Puts each operation on the queue of its stream, with the time that it would take."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.peak, self.bandwidth = settings.peak, settings.bandwidth
        self.library = library.load()
        self.library.nullgpu_now.restype = ctypes.c_double
        self.library.nullgpu_go.argtypes = self.library.nullgpu_leave_out.argtypes = [ctypes.c_double]
        self.library.nullgpu_put.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p]
        self.library.nullgpu_counters.restype = ctypes.POINTER(ctypes.c_int64)
        self.launches = self.library.nullgpu_counters()  # the first of them
        self.overhead = self.overhead_on_cpu = 0.0
        """seconds that this class costs in each operation, which a script without it would not need"""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.unknown: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: PyTorch asks this, and would otherwise run all operations one by one."""
        return True

    def put_compiled(self, name: str, moved: float, stream: int, products: bool) -> None:
        """Put a kernel of Triton on its stream."""
        if products:
            self.unknown[name] += 1
        seconds = max(moved / (self.bandwidth * ATTAINED["memory"]), SHORTEST)
        self.seconds[name] += seconds
        self.library.nullgpu_put(stream, seconds, name.encode())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; put it on the present stream."""
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor and not issubclass(kind, torch.nn.Parameter) for kind in types):
            # While the compiler traces, tensors have shapes only; the parts of a DTensor and the like come here again.
            traced = any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in types)
            return func(*args, **kwargs) if traced else NotImplemented
        before = self.launches[0]
        out = func(*args, **kwargs)
        launches = self.launches[0] - before
        if not launches:
            self.library.nullgpu_leave_out(self.overhead_on_cpu)
            return out
        self.library.nullgpu_stop()
        name, seconds = "", 0.0
        try:
            name, seconds = self.seconds_of(func, args, kwargs, out, launches)
        finally:
            self.library.nullgpu_go(self.overhead)
        # Not while the clock stands: the host waits here if the queue is full.
        self.library.nullgpu_put(torch.cuda.current_stream().cuda_stream, seconds, name.encode())
        return out

    def seconds_of(self, func: Any, args: Any, kwargs: Any, out: Any, launches: int) -> tuple[str, float]:
        """Return the name of an operation, and how long it would take."""
        name = func._schema.name.partition("::")[2]
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        moved = sum(map(size_of, tensors)) + written_in_place(func, args)
        known = {id(t) for t in tensors}
        moved += sum(size_of(t) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and id(t) not in known)
        seconds = moved / (self.bandwidth * ATTAINED["memory"])
        if count := flop_registry.get(func._overloadpacket):
            flops, kind = count(*args, **kwargs, out_val=out), kind_of(name)
            dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
            peak = self.peak_of(dtype, kind)
            seconds = max(seconds, flops / (peak * ATTAINED[kind]) + RAMP if flops else 0)
        elif not moved:
            self.unknown[name] += launches
        seconds = max(seconds, launches * SHORTEST)
        self.seconds[name] += seconds
        return name, seconds

    def peak_of(self, dtype: torch.dtype, kind: str) -> float:
        """Return the FLOP/s of the units that compute this kind of operation."""
        if kind == "attention" and dtype == torch.float32:
            # Three products of TF32 for one of fp32, whatever the flags say (torch/include/ATen/native/transformers/
            # cuda/mem_eff_attention/gemm_kernel_utils.h, for compute capability 8.0 and newer).
            return max(self.peak["fp32"], self.peak["tf32"] / 3)
        return self.peak[format_of(dtype, kind)]


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on the GPU: of one that is expanded, those that it has in memory."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def written_in_place(func: Any, args: Any) -> int:
    """Return the bytes that an operation writes to its arguments, which it has read too."""
    total = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            total += sum(size_of(t) for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor))
    return total


def format_of(dtype: torch.dtype, kind: str) -> str:
    """Return the name of the format in which matrix units compute this type."""
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16" if dtype == torch.bfloat16 else "fp16"
    fast = torch.backends.cudnn.allow_tf32 if kind == "conv" else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if dtype == torch.float32 and fast else "fp32"


class Loop:
    """When updates ended, and when the loop waited for a batch, in simulated time."""

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.loading: list[tuple[float, float]] = []
        self.began: tuple[float, float] | None = None
        """real and simulated time when the GPU was used first"""


def install(settings: Settings) -> None:
    """Begin: this process's operations take their time, and its clocks show simulated time."""
    clock = Clock(settings)
    now = clock.library.nullgpu_now
    loop = Loop()
    end = clock.library.nullgpu_end
    end.restype, end.argtypes = ctypes.c_double, [ctypes.c_void_p]
    # when the GPU has ended the update, not when the host has launched it
    call_after_updates(lambda: loop.updates.append(end(torch.cuda.current_stream().cuda_stream)))
    dataloader.DataLoader.__iter__ = without_modes(dataloader.DataLoader.__iter__)  # it starts the workers
    dataloader._BaseDataLoaderIter.__next__ = without_modes(dataloader._BaseDataLoaderIter.__next__)
    time_the_loaders(now, lambda began, ended: loop.loading.append((began, ended)))
    real = {name: getattr(time, name) for name in ("time", "perf_counter", "monotonic")}
    offsets = {name: function() - now() for name, function in real.items()}
    for name, offset in offsets.items():
        setattr(time, name, lambda offset=offset: offset + now())

    def both() -> tuple[float, float]:
        return real["perf_counter"](), now()

    def first_use() -> None:
        begin(clock, real["perf_counter"])
        loop.began = both()

    torch.cuda._lazy_call(first_use)
    compiled.install(clock.put_compiled)
    if folder := os.environ.get("NULLGPU_REPORT"):
        atexit.register(lambda: write(clock, loop, folder, both()))


def without_modes(function: Any) -> Any:
    """Return a function whose operations the clock does not see, so that it slows no loader and no worker."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def begin(clock: Clock, perf_counter: Callable[[], float]) -> None:
    """Measure what the mode costs in each operation, then enter it."""
    host, launch = clock.settings.host_speed, clock.settings.launch

    def fastest(x: torch.Tensor, now: Callable[[], float]) -> float:
        """Return the seconds of an operation in the trial that was disturbed least."""
        trials = []
        for _ in range(TRIALS):
            began = now()
            for _ in range(CALIBRATED):
                x.add_(1)
            trials.append((now() - began) / CALIBRATED)
        return min(trials)

    def simulated() -> float:
        return clock.library.nullgpu_now() * host

    on_gpu, on_cpu = torch.zeros(16, device="cuda"), torch.zeros(16)
    plain, plain_on_cpu = fastest(on_gpu, perf_counter), fastest(on_cpu, perf_counter)
    with clock:
        clock.overhead = max(0.0, fastest(on_gpu, simulated) - launch * host - plain)
        clock.overhead_on_cpu = max(0.0, fastest(on_cpu, simulated) - plain_on_cpu)
    clock.seconds.clear()
    clock.__enter__()


def write(clock: Clock, loop: Loop, folder: str, ended: tuple[float, float]) -> None:
    """Write what the report needs; ``ended`` is the real and the simulated time."""
    if not torch.cuda.is_initialized() or loop.began is None:
        return
    rank = int(os.environ.get("RANK") or 0)
    clock.library.nullgpu_spans(f"{folder}/spans{rank}.tsv".encode())
    found = {
        "updates": loop.updates,
        "loading": loop.loading,
        "seconds": dict(sorted(clock.seconds.items(), key=lambda pair: -pair[1])[:12]),
        "unknown": dict(clock.unknown.most_common()),
        "overhead": clock.overhead,
        "real": ended[0] - loop.began[0],
        "simulated": ended[1] - loop.began[1],
    }
    with open(f"{folder}/clock{rank}.json", "w") as file:
        json.dump(found, file)
