"""Run a training script on a GPU, and count per update what the CPU asks of the GPU; gpu_cases.py starts it.

python lab/studies/gpu_counts.py OUT.json SKIP SCRIPT FLAGS...

After the first SKIP updates, PyTorch's profiler (CUPTI) counts kernels, copies, replays of CUDA graphs and waits of the
CPU. The updates before are timed, without the first three, because the profiler slows down what it counts. With
SKIP 0 nothing is counted, and all updates but the first three are timed.
"""

import json
import os
import runpy
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

END = "END OF AN UPDATE"
FIRST = 3
"""updates that are not timed: kernels are chosen, memory is allocated"""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy")


class Counting:
    """Notes when updates end, and starts the profiler after the first ones."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.updates = 0
        self.ends: list[torch.cuda.Event] = []
        self.profiler: profile | None = None

    def update_ends(self) -> None:
        """Note the end of an update."""
        self.updates += 1
        if self.profiler is not None:
            with record_function(END):
                return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ends.append(event)
        if self.updates == self.skip:
            torch.cuda.synchronize()
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.start()

    def follow(self) -> None:
        """Call `update_ends` after each update, and after each replay of a CUDA graph that has captured one."""
        graph = torch.cuda.CUDAGraph
        begin, replay = graph.capture_begin, graph.replay
        capturing: list[torch.cuda.CUDAGraph] = []
        with_update: set[int] = set()

        def stepped(*_: Any) -> None:  # noqa: ANN401
            if torch.cuda.is_current_stream_capturing():
                with_update.add(id(capturing[-1]))
            else:
                self.update_ends()

        def noted_begin(one: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            capturing.append(one)
            begin(one, *args, **kwargs)

        def noted_replay(one: torch.cuda.CUDAGraph) -> None:
            replay(one)
            if id(one) in with_update:
                self.update_ends()

        graph.capture_begin, graph.replay = noted_begin, noted_replay
        register_optimizer_step_post_hook(stepped)

    def figures(self) -> dict[str, Any]:
        """Return what was counted and timed, when the script has ended."""
        torch.cuda.synchronize()
        found: dict[str, Any] = {
            "updates": self.updates,
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        if len(timed := self.ends[FIRST:]) > 1:
            found["ms"] = timed[0].elapsed_time(timed[-1]) / (len(timed) - 1)
        return found | (counted(self.profiler) if self.profiler is not None else {})


def counted(profiler: profile) -> dict[str, Any]:
    """Return what happened per update until the end of the last one."""
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    ends = sorted(one["ts"] for one in events if one.get("name") == END and one.get("cat") == "user_annotation")
    if not ends:
        return {}
    calls, on_gpu, busy = Counter[str](), Counter[str](), 0.0
    for one in events:
        category = one.get("cat", "")
        if category in ("cuda_runtime", "cuda_driver") and one["ts"] <= ends[-1]:
            calls[one["name"]] += 1
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            on_gpu["kernel" if category == "kernel" else one["name"]] += 1
            busy += one.get("dur", 0)
    mean = {name: count / len(ends) for name, count in calls.items()}
    return {
        "counted": len(ends),
        "calls": mean,
        "on_gpu": {name: count / len(ends) for name, count in on_gpu.items()},
        "kernel_ms": busy / 1e3 / len(ends),
        "waits": sum(mean.get(name, 0) for name in WAITS),
        "copies": sum(mean.get(name, 0) for name in COPIES),
        "replays": mean.get("cudaGraphLaunch", 0),
        "launches": on_gpu["kernel"] / len(ends),
    }


def main() -> int:
    """Run the script; write what was counted; return its exit status."""
    out, skip, script, *flags = sys.argv[1:]
    counting = Counting(int(skip))
    counting.follow()
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    status: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        status = stop.code or 0
    if torch.cuda.is_initialized():
        Path(out).write_text(json.dumps(counting.figures()))
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    sys.exit(main())
