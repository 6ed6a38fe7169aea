"""Who am I: the rank of this process among all that train together. By default it is the only one."""

import os
from dataclasses import dataclass

from workshop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among all that train together; by default it is the only one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes logs and files."""
        return self.rank == 0


ONE_PROCESS = Ranks()
"""where no ranks are named"""


def launched_as() -> Ranks:
    """Return what torchrun or srun set; if neither started this process, it is the only one.

    Raises UserError: what they set is no rank; or this is a job of several tasks, but srun did not start this process.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif in_srun():
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:
        tasks = max(int(env.get("SLURM_NTASKS", 1)), int(env.get("SLURM_NNODES", 1)))  # -N alone sets no tasks
        if tasks > 1:
            raise UserError(f"this job has {tasks} tasks, but only one was started: write srun before it in the job")
        return ONE_PROCESS
    found = [env.get(name, "0") for name in names]
    rank, local_rank, world_size = (int(text) if text.isdecimal() else -1 for text in found)
    if not 0 <= rank < world_size or local_rank < 0:
        told = " ".join(f"{name}={text}" for name, text in zip(names, found, strict=True))
        raise UserError(f"{told}: ranks are numbers from 0 to below the world size; torchrun and srun set them so")
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size)


def in_srun() -> bool:
    """Whether srun started this process; the batch script and interactive shells are steps too, of special numbers."""
    return int(os.environ.get("SLURM_STEP_ID", 2**32 - 5)) < 2**32 - 16
