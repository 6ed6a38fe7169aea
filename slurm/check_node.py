"""Check the GPUs of one node before a training starts; 64_gpus.slurm starts this once on each node.

    srun --ntasks-per-node=1 python slurm/check_node.py

It prints one line: the node, its GPUs, and what is wrong with them. The exit status is 1 if a GPU is missing, or has
memory errors that were not corrected, or a row of memory that could not be remapped. Then submit the job again with
--exclude=NODE, and report the node. It does not find a GPU that is slow: slurm/first_hour.slurm does.
"""

import os
import shutil
import subprocess
import sys

ERRORS = "ecc.errors.uncorrected.volatile.total"
FAILURE = "remapped_rows.failure"


def ask(query: str) -> list[list[str]]:
    """Return the rows of an ``nvidia-smi`` query, without its header and units."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def faults(granted: int, errors: list[list[str]], remapped: list[list[str]]) -> list[str]:
    """Return what is wrong with the GPUs of a node.

    Args:
        granted: GPUs that Slurm has granted on this node.
        errors: index, and uncorrected memory errors since the last reset, for each GPU ("[N/A]" without ECC).
        remapped: bus number, and whether a remapping failed ("Yes" or 1), for each GPU that can remap rows.
    """
    found = [f"{granted} GPUs were granted, {len(errors)} are there"] if len(errors) < granted else []
    found += [
        f"GPU {index} has {count} uncorrected memory errors" for index, count in errors if count.strip("0").isdigit()
    ]
    return found + [f"GPU {bus} could not remap a row of memory" for bus, failed in remapped if failed in ("Yes", "1")]


def main() -> int:
    """Print one line about this node; return the exit status."""
    node, granted = os.environ.get("SLURMD_NODENAME", "this node"), int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if "WORKSHOP_FAKE_GPUS" in os.environ or not granted or not shutil.which("nvidia-smi"):
        print(f"{node}: not checked, because there are no GPUs of NVIDIA")
        return 0
    try:
        errors, remapped = ask(f"--query-gpu=index,{ERRORS}"), ask(f"--query-remapped-rows=gpu_bus_id,{FAILURE}")
        found = faults(granted, errors, remapped)
    except (OSError, subprocess.SubprocessError) as error:  # a GPU that has fallen off the bus, or a lost driver
        found = [f"nvidia-smi does not answer: {error}"]
    print(f"{node}: {'; '.join(found) or f'{granted} GPUs without errors'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
