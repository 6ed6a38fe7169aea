"""Who am I: the rank of this process among all, the device it computes on and the CPUs it may use."""

import os
from dataclasses import dataclass, field

import torch


def pick_device() -> torch.device:
    """Return the accelerator of this machine (CUDA, Apple's MPS, ...) if it has one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def available_cpus() -> int:
    """Return how many CPUs this process may use: those of its Slurm task, else those it is allowed to run on."""
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        return int(cpus)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among all that train together; by default it is the only one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=pick_device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes logs and files."""
        return self.rank == 0
