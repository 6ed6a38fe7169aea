"""One process as rank 0 of a job of any size: the other ranks do not exist.

In the collectives of NCCL the others count as copies of this rank (native/nccl.cpp). This module does the same for what
PyTorch does on the CPU: the store of the rendezvous, groups of gloo, and distributed checkpoints. It also says how
large a group is that is split from another one, because NCCL asks the ranks themselves.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d

from . import library


def install(world: int) -> None:
    """Let process groups of this process begin without the other ranks."""
    init = c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        backend = args[0] if args else kwargs.pop("backend", None)
        kept = {name: kwargs[name] for name in ("timeout", "device_id", "pg_options") if name in kwargs}
        size = kwargs.get("world_size", -1)
        init(backend, store=dist.HashStore(), rank=0, world_size=size if size > 0 else world, **kept)

    def gloo(store: Any, rank: int, size: int, **options: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        return FakeProcessGroup._create_internal(rank, size)

    def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any) -> None:
        # The shards of the other ranks are missing, so this would be no checkpoint. Its folder is there, without them.
        folder = Path(checkpoint_id or storage_writer.path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").touch()

    def async_save(state_dict: Any, **kwargs: Any) -> Future:
        save(state_dict, **{name: kwargs.get(name) for name in ("checkpoint_id", "storage_writer")})
        done: Future = Future()
        done.set_result(None)
        return done

    tell_sizes_of_groups()
    for module in (dcp, dcp.state_dict_saver):
        module.save, module.async_save = save, async_save
    dist.init_process_group = c10d.init_process_group = init_process_group
    c10d.ProcessGroupGloo = gloo


def tell_sizes_of_groups() -> None:
    """Tell the library of each group how many ranks it has, and which is the last, before it is split from another."""
    tell, color_of, make = library.load().nullgpu_group, c10d._process_group_color, c10d._new_process_group_helper

    def color(ranks: list[int]) -> int:
        value = color_of(ranks)
        tell(value, len(ranks), max(ranks))
        return value

    def make_group(size: int, rank: int | None, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        tell(-1, size, max(ranks, default=size - 1))
        try:
            return make(size, rank, ranks, *args, **kwargs)
        finally:
            tell(-1, 0, 0)

    c10d._process_group_color, c10d._new_process_group_helper = color, make_group
    split = dist.ProcessGroup.split_group

    def split_group(group: dist.ProcessGroup, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        tell(-1, len(ranks), max(ranks))
        try:
            return split(group, ranks, *args, **kwargs)
        finally:
            tell(-1, 0, 0)

    dist.ProcessGroup.split_group = split_group
