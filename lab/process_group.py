"""The process group of an experiment that is started as ranks: joined and left by the calls of 03_ddp/train.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lab.launching import load_script
from workshop.distributed import failure_detector, rendezvous
from workshop.hardware import cpu_or_error
from workshop.paths import REPOSITORY


@contextmanager
def process_group() -> Iterator[tuple[int, int, torch.device]]:
    """Join the other ranks; give rank, world size and device of this process; destroy the process group at the end.

    Raises:
        UserError: not all ranks join, or not each of them has a GPU of its own.
    """
    rank, local_rank, world_size = load_script(REPOSITORY / "03_ddp").ranks_from_env()
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = cpu_or_error()
    store = rendezvous(rank, world_size, device)
    with failure_detector(store, rank, world_size):
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
        )
        yield rank, world_size, device
        dist.destroy_process_group()
