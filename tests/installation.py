"""Say what the tests found here, before they begin: a broken installation is no failing test.

Exit status 2 if a package that the lessons need cannot be imported.
"""

import importlib
import os
import platform
import shutil
import sys

NEEDED = (
    "torch",
    "torchvision",
    "line_profiler",
    "tensorboard",
    "yaml",
    "jsonargparse",
    "h5py",
    "psutil",
    "matplotlib",
)
OPTIONAL = {"nvidia.dali": "--loader dali", "pynvml": "--monitor on a GPU"}


def main() -> None:
    """Import what is needed, print one line for each thing found, and end with status 2 if something is missing."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"Python {platform.python_version()} at {sys.executable}, {cpus} CPU(s), {platform.system()}")
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise any
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"error: the installation is broken: cannot import {name}: {reason}; `make clean`, then `make test`")
            sys.exit(2)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (the tests need none)"
    print(f"torch {torch.__version__}, {gpu}")
    for name, use in OPTIONAL.items():
        try:
            importlib.import_module(name)
        except Exception:
            print(f"no {name}: tests of {use} are skipped")
    slurm = (
        "Slurm: its tests run on a cluster of their own"
        if shutil.which("slurmctld")
        else "no Slurm: its tests are skipped"
    )
    print(slurm)


if __name__ == "__main__":
    main()
