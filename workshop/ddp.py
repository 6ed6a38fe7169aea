"""What lesson 03 adds around DistributedDataParallel: its knobs as flags, and a count of what it communicates."""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from workshop.config import TrainConfig
from workshop.distributed import Ranks
from workshop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DDPConfig(TrainConfig):
    """The flags of every lesson that trains with several processes."""

    global_batch_size: int | None = None
    """samples per step over all ranks; if given, it is shared among them, whatever --batch_size says"""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """how --lr, meant for steps of base_batch_size samples, grows with the global batch"""
    base_batch_size: int = 64
    """the global batch that --lr is meant for"""
    warmup: float = 0.1
    """share of all steps in which the learning rate rises from almost nothing"""
    bucket_cap_mb: float | None = None
    """gradients travel in buckets of at most so many MiB (default: PyTorch's 25, the first one 1)"""
    gradient_as_bucket_view: bool = False
    """let the gradients live in the buckets instead of being copied there: saves memory for one set of them"""
    static_graph: bool = False
    """promise that every step uses the same parameters in the same way, which lets DDP prepare more"""
    forward_sync_buffers: bool = True
    """before each forward pass, give all ranks the buffers (such as batch norm's statistics) of rank 0"""
    sync_gradients: bool = True
    """false: no communication, to measure what it costs; each rank then trains on its own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("global_batch_size", "base_batch_size", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"--{name} must be above 0, got {value}")
        if self.static_graph and not self.sync_gradients:
            raise UserError("--static_graph true has DDP learn the graph while it communicates: --sync_gradients true")
        if not 0 <= self.warmup < 1:
            raise UserError(f"--warmup is a share of all steps, from 0 to below 1, got {self.warmup}")


C = TypeVar("C", bound=DDPConfig)


def share_batch(config: C, ranks: Ranks) -> C:
    """Return the configuration with ``batch_size``, which is per rank, set from ``global_batch_size`` if that is given.

    Raises:
        UserError: the ranks cannot share it evenly.
    """
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


def ddp_options(config: DDPConfig) -> dict[str, Any]:
    """Return the knobs as ``DistributedDataParallel`` takes them; torch 2.13 gave one of them a new name."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "static_graph": config.static_graph,
        buffers: config.forward_sync_buffers,
    }


class AllReduces:
    """Counts the all-reduces of gradients in a step and their bytes, without changing what DDP does.

    DDP calls the hook once per bucket, as soon as the gradients in it are ready, and continues with backward while they
    travel. After the first step it arranges the buckets anew, in the order the gradients became ready, so it is the
    last step that counts.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.calls = self.bytes = 0
        self._calls = self._bytes = 0
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
