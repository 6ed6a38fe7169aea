"""The most memory that tensors take while a model trains."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def peak_bytes_on_cpu(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the most bytes in CPU tensors during ``step``: weights, optimizer state and all that the step makes.

    The profiler reports when each block of memory is allocated and when it is freed. What libraries allocate for
    themselves, past PyTorch, is not seen. Gradients of an earlier step are dropped.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # all the profiler's log has to say here is that there is no GPU
    optimizer.zero_grad()
    kept = [*model.parameters(), *model.buffers()]
    kept += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    level = peak = sum(tensor.nbytes for tensor in kept)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    return peak


class PeakOnCuda:
    """The most bytes in tensors on a CUDA device since it was made, without those that were there before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = torch.cuda.memory_allocated(device)
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def bytes(self) -> int:
        """Return the peak."""
        return torch.cuda.max_memory_allocated(self.device) - self.before
