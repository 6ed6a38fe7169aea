"""Compute the next batches on a GPU while the training computes: on another stream, one step ahead."""

from collections.abc import Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream on a GPU, and None on other devices."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def one_ahead(items: Iterator[T], own: torch.cuda.Stream | None) -> Iterator[T]:
    """Yield what an iterator computes on a GPU, each item while the caller works on the one before.

    A GPU executes what was launched on one stream in this order, but may execute two streams at the same time. So the
    items are computed on a stream of their own. Two rules are needed, and no more:

    - the caller's stream waits for the item that it is given (not for the one that is computed ahead);
    - an item is computed after what the caller has launched so far. So it can take the memory of an item that the
      caller has dropped, although the allocator knows of one stream only (``Tensor.record_stream`` would be the other
      way). And no more than three items exist at a time, however far the CPU runs ahead of the GPU.

    Args:
        items: launches the kernels of an item when it is asked for it.
        own: from `stream_on`, the same in all epochs: the allocator keeps memory for each stream.
    """
    if own is None:
        yield from items
        return

    def compute() -> tuple[T, torch.cuda.Event] | None:
        own.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.stream(own):
            item = next(items, None)
            return None if item is None else (item, own.record_event())

    ahead = compute()
    while ahead is not None:
        item, computed = ahead
        del ahead  # or the item would stay until the caller has come back twice
        ahead = compute()
        torch.cuda.current_stream(own.device).wait_event(computed)
        yield item
        del item


def to_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to a device. Without pinned memory, the CPU would wait there for all that was launched."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
