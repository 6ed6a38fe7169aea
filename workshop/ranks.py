"""The rank of this process, and its device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank, local rank, world size and device of this process; by default it is the only one."""

    device: torch.device
    """device that this process trains on"""
    rank: int = 0
    """number of this process in the whole job, from 0"""
    local_rank: int = 0
    """number of this process on its node, from 0"""
    world_size: int = 1
    """number of ranks"""
