"""Start ranks where the study runs: with srun in a Slurm job, on all of its nodes, with torchrun on one machine."""

import math
import os
import shutil
import subprocess
import sys

from lab.launching import torchrun


def in_slurm() -> bool:
    """Whether this is a Slurm job, so that srun starts the ranks, on all of its nodes."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def launcher(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` Python processes: srun in a Slurm job, torchrun on one machine."""
    if not in_slurm():
        return torchrun(ranks)
    per_node = slurm_tasks() // int(os.environ.get("SLURM_NNODES", 1))
    nodes = math.ceil(ranks / per_node)
    layout = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={min(ranks, per_node)}"]
    if "MASTER_ADDR" not in os.environ:  # a shell of salloc; job files export where the ranks connect
        hosts = subprocess.run(["scontrol", "show", "hostnames"], stdout=subprocess.PIPE, text=True).stdout
        first, port = hosts.split("\n")[0], 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
        layout.append(f"--export=ALL,MASTER_ADDR={first},MASTER_PORT={port}")
    # From the first node on, because the ranks connect to it; if one rank fails, all end.
    return ["srun", "--relative=0", *layout, "--kill-on-bad-exit=1", sys.executable]


def slurm_tasks() -> int:
    """Return how many tasks this Slurm job has."""
    return max(int(os.environ.get("SLURM_NTASKS", 1)), int(os.environ.get("SLURM_NNODES", 1)))
