"""Record, in a process of the command, the data of the report; `report` reads it when the command has ended."""

import atexit
import json
import os
import pickle
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

import torch

from . import library
from .interface import SKIPPED, SKIPPED_OF_LONG_RUNS, Notice
from .updates import call_after_updates, time_the_loaders

OWN = str(Path(__file__).resolve().parent)
LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen", "<string>", OWN)
"""parts of the names of files that are not the user's"""
BACKWARD = "in backward, or in a thread of PyTorch's"
TIMERS = "in DDP, which times its first steps"
DDP = os.path.join("nn", "parallel", "distributed.py")
WORKSPACES = {4096 * 8 * 1024: "cuBLAS", (4096 * 2 + 16 * 8) * 1024: "cuBLAS"}
"""bytes of the workspaces that PyTorch allocates for a library (aten/src/ATen/cuda/CublasHandlePool.cpp): on Hopper and
newer GPUs, and on older ones"""
MOST_ENTRIES = 200_000
"""allocations and frees that are kept"""


class Recorder:
    """What has been seen so far: per update of an optimizer the counters, and events by line."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.updates: list[dict[str, float]] = []
        self.lines: list[Counter[tuple[str, str, str]]] = []
        """of each update: how often (what, detail, place)"""
        self.now: Counter[tuple[str, str, str]] = Counter()
        self.loading = 0.0
        self.last = (time.perf_counter(), library.counters(), 0.0)
        self.out_of_memory: dict[str, Any] | None = None

    def event(self, kind: int, name: str, size: int, pageable: bool) -> None:
        """Note a wait, a copy or a collective with the line that caused it."""
        if kind == Notice.MISSING:
            traceback.print_stack(file=sys.stderr)
            return
        what = Notice(kind).name.lower()
        detail = name if what != "copy" else f"{name} {'pageable' if pageable else 'pinned'}"
        frame = sys._getframe(1)
        where = TIMERS if name == "cudaEventSynchronize" and is_within(frame, DDP) else place(frame)
        self.now[what, detail, where] += 1

    def add_loading(self, began: float, ended: float) -> None:
        """Add up the seconds in which loops wait for batches."""
        self.loading += ended - began

    def update_ends(self) -> None:
        """Note what has happened since the end of the update before."""
        clock, before, loading = self.last
        now, counted = time.perf_counter(), library.counters()
        row: dict[str, float] = {name: counted[name] - before[name] for name in counted}
        row |= {"seconds": now - clock, "loading": self.loading - loading}
        self.updates.append(row)
        self.lines.append(self.now)
        self.now = Counter()
        self.last = (now, counted, self.loading)

    def write(self) -> None:
        """Write what has been seen, and the history of the memory; of processes that have used no GPU, nothing."""
        if not torch.cuda.is_initialized() or not library.counters()["launches"]:
            return
        device = torch.cuda.current_device()
        is_long = len(self.updates) > 2 * SKIPPED_OF_LONG_RUNS
        first = SKIPPED_OF_LONG_RUNS if is_long else min(SKIPPED, max(len(self.updates) - 1, 0))
        counted, lines = self.updates[first:], self.lines[first:]
        found: dict[str, Any] = {
            "rank": int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0),
            "world": int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1),
            "device": torch.cuda.get_device_name(device),
            "memory": torch.cuda.get_device_properties(device).total_memory,
            "values": library.settings().values,
            "torch": torch.__version__,
            "updates": len(self.updates),
            "counted": len(counted),
            "step": {name: mean(row[name] for row in counted) for name in counted[0]} if counted else {},
            "total": library.counters(),
            "lines": mean_of(lines) if lines else [[*key, n] for key, n in self.now.most_common()],
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
        snapshot = self.out_of_memory or torch.cuda.memory._snapshot()
        found |= {"holders": holders(snapshot, device), "out_of_memory": self.out_of_memory is not None}
        name = f"rank{found['rank']}"
        with (self.folder / f"{name}.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
        (self.folder / f"{name}.json").write_text(json.dumps(found))


def mean_of(lines: list[Counter[tuple[str, str, str]]]) -> list[list[Any]]:
    """Return (what, detail, place, how often in an update) of each event, the most frequent ones first."""
    keys = {key for one in lines for key in one}
    often = {key: mean(one[key] for one in lines) for key in keys}
    return [[*key, often[key]] for key in sorted(often, key=lambda key: -often[key])]


def is_users(file: str) -> bool:
    """Whether a file belongs neither to Python, nor to an installed package, nor to the null GPU."""
    return not any(part in file for part in LIBRARIES)


def place(frame: FrameType | None) -> str:
    """Return the user's innermost line, as FILE:LINE in FUNCTION."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return BACKWARD


def is_within(frame: FrameType | None, file: str) -> bool:
    """Whether a function of this file has been called and has not returned."""
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


def place_of(frames: list[dict[str, Any]]) -> str:
    """Return the same from the frames that PyTorch's allocator has noted."""
    for frame in frames:
        if is_users(frame["filename"]):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return BACKWARD


def holders(snapshot: dict[str, Any], device: int) -> dict[str, Any]:
    """Return the lines that hold the memory at its peak, from PyTorch's history of the memory.

    The history is read backwards, from the blocks that are in use at its end.
    """
    trace = snapshot["device_traces"][device] if device < len(snapshot["device_traces"]) else []
    in_use = {
        block["address"]: (
            block["requested_size"] if "requested_size" in block else block["size"],
            block.get("frames", []),
            block["size"],
        )
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] == "active_allocated"
    }
    total = sum(size for _, _, size in in_use.values())
    peak, at = total, len(trace)
    for index in range(len(trace) - 1, -1, -1):
        entry = trace[index]
        if entry["action"] == "alloc":
            total -= entry["size"]
        elif entry["action"] == "free_requested":
            total += entry["size"]
            if total > peak:
                peak, at = total, index
    held = {address: (size, frames) for address, (_, frames, size) in in_use.items()}
    for index in range(len(trace) - 1, at - 1, -1):
        entry = trace[index]
        if entry["action"] == "alloc":
            held.pop(entry["addr"], None)
        elif entry["action"] == "free_requested":
            held[entry["addr"]] = (entry["size"], entry.get("frames", []))
    by_line: Counter[str] = Counter()
    for size, frames in held.values():
        where = place_of(frames)
        if where == BACKWARD and size in WORKSPACES:
            where = f"in {WORKSPACES[size]}, as its workspace"
        by_line[where] += size
    return {"peak": peak, "lines": by_line.most_common(8), "complete": len(trace) < MOST_ENTRIES}


def install(folder: str) -> None:
    """Begin to note."""
    recorder = Recorder(folder)
    library.observe(recorder.event, *Notice)
    call_after_updates(recorder.update_ends)
    time_the_loaders(time.perf_counter, recorder.add_loading)

    def begin() -> None:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(out_of_memory)

    def out_of_memory(device: int, wanted: int, free: int, total: int) -> None:
        recorder.out_of_memory = torch.cuda.memory._snapshot()

    torch.cuda._lazy_call(begin)  # when CUDA is initialized, and not before
    atexit.register(recorder.write)
