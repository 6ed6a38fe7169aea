"""Count what DistributedDataParallel sends in a training step."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class AllReduceCounter:
    """Counts the all-reduces of gradients in a step and their bytes, without changing what DDP does.

    DDP calls the hook once per bucket, as soon as the gradients in it are ready, and continues with backward while they
    are sent. After the first step it arranges the buckets anew, in the order in which the gradients became ready; so
    the counts of the last step are reported. The hook takes some time; with ``enabled=False`` there is none.
    """

    def __init__(self, model: DistributedDataParallel, enabled: bool = True) -> None:
        self.calls = self.bytes = 0
        self._calls = self._bytes = 0
        if enabled:
            model.register_comm_hook(None, self._all_reduce)

    # register_comm_hook checks these type hints: they must be exactly those of a communication hook.
    def _all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._calls += 1
        self._bytes += bucket.buffer().nbytes
        if bucket.is_last():
            self.calls, self.bytes = self._calls, self._bytes
            self._calls = self._bytes = 0
        return allreduce_hook(dist.group.WORLD, bucket)

    def per_step(self) -> dict[str, int]:
        """Return their number and bytes in the last step, for summary.json."""
        return {"all_reduces_per_step": self.calls, "all_reduce_bytes_per_step": self.bytes}

    def __str__(self) -> str:
        return f"gradients: {self.calls} all-reduce(s) per step, {self.bytes / 1e6:,.2f} MB"
