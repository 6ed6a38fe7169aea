"""What goes around DistributedDataParallel: sharing out a batch, and counting what the ranks send each other."""

import dataclasses
import inspect
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from workshop.config import DDPFlags
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError

C = TypeVar("C", bound=DDPFlags)


def share_batch(config: C, ranks: Ranks) -> C:
    """Share out ``global_batch_size``, if given, as ``batch_size`` per rank; `UserError` if that leaves a rest."""
    if config.global_batch_size is None:
        return config
    share, rest = divmod(config.global_batch_size, ranks.world_size)
    if rest:
        near = max(share, 1) * ranks.world_size
        raise UserError(
            f"--global_batch_size {config.global_batch_size} cannot be shared evenly by {ranks.world_size} ranks; "
            f"{near} or {near + ranks.world_size} could"
        )
    return dataclasses.replace(config, batch_size=share)


def forward_sync_buffers(yes: bool) -> dict[str, bool]:
    """Return this argument of ``DistributedDataParallel`` by the name that the installed torch has for it.

    It was ``broadcast_buffers`` before torch 2.13: once that is the oldest to be supported, this can go.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": yes}


class AllReduces:
    """Counts the all-reduces of gradients in a step and their bytes, without changing what DDP does.

    DDP calls the hook once per bucket, as soon as the gradients in it are ready, and continues with backward while they
    travel. After the first step it arranges the buckets anew, in the order the gradients became ready, so it is the
    last step that counts. Where time is measured it is not ``enabled``, as the hook takes some.
    """

    def __init__(self, model: DistributedDataParallel, enabled: bool = True) -> None:
        self.calls = self.bytes = 0
        self._calls = self._bytes = 0
        if enabled:
            model.register_comm_hook(None, self._all_reduce)

    def _all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._calls += 1
        self._bytes += bucket.buffer().nbytes
        if bucket.is_last():
            self.calls, self.bytes = self._calls, self._bytes
            self._calls = self._bytes = 0
        return allreduce_hook(None, bucket)

    def per_step(self) -> dict[str, int]:
        """Return their number and bytes in the last step, for summary.json."""
        return {"all_reduces_per_step": self.calls, "all_reduce_bytes_per_step": self.bytes}

    def __str__(self) -> str:
        return f"gradients: {self.calls} all-reduce(s) per step, {self.bytes / 1e6:,.2f} MB"
