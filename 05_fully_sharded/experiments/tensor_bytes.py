"""Bytes of the tensors of a training step on the CPU: at most, between two steps, and kept for backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lab.allocations import peak_of, recorder, trace_events


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that this rank stores, or the tensor itself; no copy is made."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def stored_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the weights, buffers and optimizer state that this rank stores between two steps."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, torch.Tensor))]
    return [local(tensor.detach()) for tensor in kept]


def peak_bytes(step: Callable[[], object], stored: Iterable[torch.Tensor]) -> int:
    """Return the most bytes in CPU tensors during ``step``: those that are ``stored`` before it, and all it makes.

    The profiler reports when memory is allocated and when it is freed. What libraries allocate for themselves, past
    PyTorch, is not seen. Gradients of an earlier step must have been deleted.
    """
    level = sum(tensor.nbytes for tensor in stored)
    with recorder() as recorded:
        step()
    return peak_of(trace_events(recorded), level)


def bytes_kept_for_backward(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes of all tensors that autograd keeps when ``forward`` is called, without the model's weights.

    A tensor that several operations keep counts once.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    tensors = []  # so that none is freed before the end, when another one could take its place in memory

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result
    return sum(size for where, size in kept.items() if where not in weights)
