"""What this machine is and which software ran: the part of every record that makes a figure mean something."""

import ctypes
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from workshop.distributed import available_cpus

PACKAGES = ("torch", "torchvision", "line_profiler", "nvidia-dali-cuda120", "numpy")


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Name the machine's processor and memory, the CPUs and threads in use and, where there is one, the accelerator."""
    hardware = {
        "cpu": _cpu_name(),
        "cpus_available": available_cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"device_name": properties.name, "device_memory_bytes": properties.total_memory}
    return hardware


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python, of torch's CUDA and of the packages that matter; None where not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: on CUDA that allocated there, else the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> None:
    """Have the C library reuse large blocks of freed memory instead of giving them back to the system each time.

    Memory fresh from the system costs a page fault for every 4 KiB, and a training step on a CPU frees and asks for
    the same large tensors again and again. (PyTorch does the same for GPU memory, always.) Does nothing where the C
    library is not glibc. Source: mallopt(3).
    """
    if platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_threshold, large = -1, -3, 2**30
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, large)
        libc.mallopt(m_trim_threshold, large)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
