"""The most memory that tensors take while a model trains."""

from collections.abc import Callable

import torch
from torch import nn

from lab.allocations import peak_of, recorder, trace_events


def peak_bytes_on_cpu(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the most bytes in CPU tensors during ``step``: weights, optimizer state and all that the step makes.

    The profiler reports when each block of memory is allocated and when it is freed. What libraries allocate for
    themselves, past PyTorch, is not seen. Gradients of an earlier step are dropped.
    """
    optimizer.zero_grad()
    kept = [*model.parameters(), *model.buffers()]
    kept += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    with recorder() as recorded:
        step()
    return peak_of(trace_events(recorded), level=sum(tensor.nbytes for tensor in kept))


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
