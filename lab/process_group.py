"""The process group of an experiment that torchrun starts as ranks:

with process_group() as (rank, world_size, device):
    ...
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(*, on_cpu: bool = False) -> Iterator[tuple[int, int, torch.device]]:
    """Join the other ranks; give rank, world size and device of this process; destroy the process group at the end.

    Args:
        on_cpu: compute on the CPU, and hide the GPUs from everything that looks for one.
    """
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rank, local_rank, world_size = (int(os.environ.get(name, fallback)) for name, fallback in RANK_NAMES.items())
    device = torch.device("cpu")
    if torch.cuda.is_available():  # %, because a task that sees only its own GPU calls it cuda:0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # the backend of the lessons; 03_ddp/train.py says why
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if world_size == 1 else None,
        timeout=timedelta(minutes=5),
        device_id=device if device.type == "cuda" else None,
    )
    yield rank, world_size, device
    # Without it, a thread of gloo can still hold a tensor of the last collective when Python has ended, and aborts:
    # https://github.com/pytorch/pytorch/pull/179291
    dist.barrier()
    dist.destroy_process_group()


RANK_NAMES = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
"""the environment variables that torchrun sets, and what holds for a single process that was started without it"""


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a number () over all ranks, on all of them; added up in 64 bits."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
