"""An emulated GPU: it takes the time that a GPU takes, and computes nothing.

On a machine without a GPU, the training process and the loader workers share the CPUs. Therefore nothing that a GPU
user sees can be shown there: launching is not immediate, and workers gain nothing. This module emulates the part of a
GPU that matters for the question *where does the time go?*

- Work is put into a queue. It takes time there, one piece after the other, but no CPU.
- Launching returns at once, unless the queue is full.
- Reading a value (``.item()``, ``.tolist()``, printing) waits until the queue is empty.

It is not a simulator: it knows nothing of kernels, memory or copies, and its durations are not measured. They are
published figures (`PUBLISHED`), or what the caller says. No loss and no accuracy of a run with it means anything. Each
figure that is made with it is labeled "emulated GPU".
"""

import gzip
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

QUEUE_DEPTH = 20
"""pieces of work that can be queued: forward and backward of ten training steps. The queue of a GPU holds about a
thousand kernels, and a step of a small network launches about a hundred of them."""
FORWARD_SHARE = 1 / 3
"""of a step's time: backward computes two gradients, of inputs and of weights, where forward computes once"""

WAIT = "wait"
"""category of the times in a trace in which the CPU waited for the emulated GPU"""


@dataclass(frozen=True)
class Durations:
    """How long one sample takes, in seconds."""

    gpu: float
    """forward, backward and optimizer on the GPU"""
    load: float
    """one loader worker that prepares it; 0: what it really takes on this machine"""
    what: str
    """whose figures these are"""


PUBLISHED = {
    # https://github.com/NERSC/sc22-dl-tutorial, README, "Using the benchy profiling tool": with 2 workers IO is 89.177
    # samples/s and SYNTHETIC 376.537 samples/s, for a 3D U-Net.
    "a100": Durations(gpu=1 / 376.537, load=2 / 89.177, what="a 3D U-Net on one A100 (NERSC)"),
    # The same README, section on APEX and JIT: IO 792.513 (with DALI) and SYNTHETIC 707.966 samples/s.
    "a100_optimized": Durations(
        gpu=1 / 707.966, load=1 / 792.513, what="a 3D U-Net on one A100 with DALI, AMP, APEX and JIT (NERSC)"
    ),
    # https://github.com/PrincetonUniversity/multi_gpu_training, 01_single_gpu/README.md: of 48.428 s for 2,814 steps of
    # 64 digits, 40.013 s are on the line of the loader. The rest, 2.99 ms a step, stands for the GPU, which may have
    # worked longer, while that line waited. The time of their loader is not used: it is that of their CPU.
    "v100": Durations(gpu=(48.428 - 40.013) / 2814 / 64, load=0.0, what="a small CNN on one V100 (Princeton)"),
}


@dataclass(frozen=True)
class Piece:
    """A piece of work: when it was launched, when it began on the emulated GPU, and how long it took there."""

    name: str
    launched: float
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        """When it was done."""
        return self.began + self.seconds


@dataclass(frozen=True)
class Wait:
    """A time in which the CPU waited for the emulated GPU, and why."""

    why: str
    began: float
    ended: float


class EmulatedGPU:
    """A queue of work that takes time, but no CPU.

    No thread is needed. When a piece is launched, the moment at which it will be done is known: it begins when the
    piece before it is done, or now. Waiting for it means sleeping until then.

    Args:
        depth: length of the queue; launching one more waits until the oldest is done.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        depth: int = QUEUE_DEPTH,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.depth = depth
        self.pieces = deque[Piece](maxlen=10_000)
        """the latest ones that were launched"""
        self.waits = deque[Wait](maxlen=10_000)
        self._queued = deque[Piece]()
        self._free_at = 0.0
        self._clock, self._sleep = clock, sleep

    def launch(self, name: str, seconds: float) -> Piece:
        """Queue a piece of work; return at once, or, if the queue is full, when the oldest piece in it is done."""
        launched = self._clock()
        while self._queued and self._queued[0].ended <= launched:
            self._queued.popleft()
        if len(self._queued) >= self.depth:
            self.wait_for(self._queued.popleft(), "the queue is full")
        piece = Piece(name, launched, max(self._clock(), self._free_at), seconds)
        self._free_at = piece.ended
        self._queued.append(piece)
        self.pieces.append(piece)
        return piece

    def wait_for(self, piece: Piece, why: str = "a value is read") -> None:
        """Return when this piece is done."""
        began = self._clock()
        if piece.ended > began:
            while (left := piece.ended - self._clock()) > 0:
                self._sleep(left)
            self.waits.append(Wait(why, began, self._clock()))

    def synchronize(self) -> None:
        """Return when all work is done."""
        if self._queued:
            self.wait_for(self._queued[-1])
            self._queued.clear()


class EmulatedTensor(torch.Tensor):
    """A tensor in the memory of the emulated GPU: reading a number from it waits until all queued work is done.

    What is computed from it is on the emulated GPU too. As a process that trains has one GPU, `gpu` belongs to the
    class. The numbers in it are those of the CPU, which has to compute a few bytes, such as a loss.
    """

    gpu: ClassVar[EmulatedGPU]

    READS = (
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu),
        *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.__index__),
        *(torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__array__, torch.Tensor.__contains__),
    )
    """the functions that need the numbers"""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Call the function; if it reads numbers, wait for the emulated GPU first, and call it with plain tensors."""
        if function in cls.READS:
            cls.gpu.synchronize()
            with torch._C.DisableTorchFunctionSubclass():
                plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
                return function(*plain, **(kwargs or {}))
        if function is torch.Tensor.__setitem__ and type(args[0]) is torch.Tensor:
            args[0].__class__ = cls  # a tensor that takes a number of the GPU is on the GPU
        return super().__torch_function__(function, types, args, kwargs or {})


def add_to_trace(trace: Path, gpu: EmulatedGPU) -> None:
    """Add to a trace of ``torch.profiler`` what the emulated GPU did, in the form in which a real one appears there.

    Each piece of work has a launch on the CPU and a kernel on the GPU, which a number connects. The times in which the
    CPU waited are a row of their own. What was launched before or after the traced steps is left out.
    """
    with gzip.open(trace, "rt") as lines:
        content = json.load(lines)
    ranges = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    first, last = min(event["ts"] for event in ranges), max(event["ts"] + event["dur"] for event in ranges)
    # The trace counts microseconds from a base time since 1970, the emulated GPU seconds of perf_counter.
    offset = _clock_offset() - content.get("baseTimeNanoseconds", 0)

    def add(category: str, name: str, row: str, began: float, seconds: float, correlation: int | None = None) -> None:
        event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": "emulated GPU", "tid": row}
        event |= {"ts": 1e6 * began + offset / 1e3, "dur": 1e6 * seconds, "args": {"correlation": correlation}}
        content["traceEvents"].append(event)

    def is_traced(at: float) -> bool:
        return first <= 1e6 * at + offset / 1e3 <= last

    for number, piece in enumerate(gpu.pieces):
        if is_traced(piece.launched):
            add("cuda_runtime", f"launch {piece.name}", "launches", piece.launched, 1e-6, number)
            add("kernel", f"emulated {piece.name}", "work", piece.began, piece.seconds, number)
    for wait in gpu.waits:
        if is_traced(wait.began):
            add(WAIT, wait.why, "the CPU waits", wait.began, wait.ended - wait.began)
    with gzip.open(trace, "wt") as lines:
        json.dump(content, lines)


def _clock_offset() -> int:
    """Return by how many nanoseconds time() is ahead of perf_counter().

    On a busy machine a process may lose its CPU between the two readings. Therefore it reads them a hundred times, and
    takes the pair that was read fastest.
    """
    readings = []
    for _ in range(100):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]
