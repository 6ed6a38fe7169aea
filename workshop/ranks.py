"""Which of the processes that train together this one is."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all that train together, and its device. By default it is the only one."""

    device: torch.device
    """that this process trains on"""
    rank: int = 0
    """number of this process in the whole job"""
    local_rank: int = 0
    """number of this process on its node"""
    world_size: int = 1
    """number of processes that train together"""
