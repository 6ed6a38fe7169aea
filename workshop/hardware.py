"""The device to compute on, the CPUs and the memory to use, and a description of the machine and its software."""

import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from workshop.errors import UserError

CPUINFO = Path("/proc/cpuinfo")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CPU_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""what /proc/cpuinfo calls the instructions for 16-bit formats, on x86 and ARM"""
SHORTEST_LOOK = 2.0
"""seconds; over less, the counters of the system are too coarse"""
CPUS_LEFT = 0.8
"""minimum share of this run's CPUs that must be free"""
PACKAGES = ("torch", "torchvision", "line_profiler", "nvidia-dali-cuda120", "numpy")


def pick_device() -> torch.device:
    """Return the accelerator of this machine (CUDA, Apple's MPS, ...) if it has one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or cpu_or_error()


def cpu_or_error() -> torch.device:
    """Return the CPU; raise a `UserError` if this process was granted a GPU that torch does not find.

    Otherwise training would go on silently on the CPU, for example if the driver is older than torch's CUDA.
    """
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
    granted = next((f"{name}={os.environ[name]}" for name in names if name in os.environ), "")
    # With WORKSHOP_FAKE_GPUS, the local Slurm of slurm/local_cluster.sh grants GPUs that do not exist.
    if re.search("S=[0-9]|=GPU-|=MIG-|NODE=[1-9]", granted) and "WORKSHOP_FAKE_GPUS" not in os.environ:
        raise UserError(
            f"{granted}, but torch {torch.__version__} (built for CUDA: {torch.version.cuda or 'no'}) finds no GPU: "
            "CUDA 13 needs driver R580 or newer, an older driver needs a torch built for an older CUDA; or train on "
            "CPUs with CUDA_VISIBLE_DEVICES= in the environment"
        )
    return torch.device("cpu")


def available_cpus() -> int:
    """Return how many CPUs this process may use: those of its Slurm task, else those it is allowed to run on."""
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        return int(cpus)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processes() -> tuple[float, int]:
    """Return CPU seconds and resident bytes of this process and of those that it has started, such as loader workers.

    The CPU seconds count from their start. Memory that processes share, such as a data set loaded before
    the workers were started, counts once for each.
    """
    cpu_seconds, rss = 0.0, 0
    this = psutil.Process()
    for process in [*this.children(recursive=True), this]:
        try:
            times = process.cpu_times()
            rss += process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        # The time of a process that has ended is added to children_user and children_system of its parent.
        cpu_seconds += times.user + times.system + times.children_user + times.children_system
    return cpu_seconds, rss


def allowed_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process is allowed to run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class OtherWork:
    """CPU time that other programs take on the CPUs of this run, since this object was created."""

    def __init__(self) -> None:
        self._started = self._read()

    def _read(self) -> tuple[float, float, float]:
        all_cpus = psutil.cpu_times(percpu=True)
        allowed = [all_cpus[cpu] for cpu in allowed_cpus() if cpu < len(all_cpus)]
        busy = sum(sum(times) - times.idle - getattr(times, "iowait", 0.0) for times in allowed)
        guests = sum(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0) for times in allowed)
        return time.monotonic(), busy - guests, processes()[0]  # Linux counts the time of guests twice

    def cpus(self) -> float | None:
        """Return the mean number of CPUs that other programs used so far; None if too little time has passed."""
        seconds, busy, own = (now - before for now, before in zip(self._read(), self._started, strict=True))
        return max(0.0, busy - own) / seconds if seconds >= SHORTEST_LOOK else None

    def note(self, workers: int = 0) -> str | None:
        """Return a sentence if too few CPUs were left to this run and its loader workers, else None."""
        others, wanted = self.cpus(), min(available_cpus(), torch.get_num_threads() + workers)
        return None if others is None else busy_note(others, len(allowed_cpus()), wanted)


def busy_note(others: float, cpus: int, wanted: int) -> str | None:
    """Return a sentence on programs that take CPUs from this run, or None if they do not.

    Args:
        others: mean number of CPUs that other programs used.
        cpus: number of CPUs that this process is allowed to run on.
        wanted: number of CPUs that this run can use.
    """
    if cpus - others >= CPUS_LEFT * wanted:
        return None
    or_else = " or `export OMP_NUM_THREADS=1`," if torch.get_num_threads() > 1 else ""
    return (
        f"other programs used {others:.1f} of {cpus} CPUs: these speeds, and which part is slower, are not those of "
        f"an idle machine; end them (`top` lists them),{or_else} and measure again"
    )


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Name the machine's processor and memory, the CPUs and threads in use and, where there is one, the accelerator."""
    hardware = {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus_available": available_cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"device_name": properties.name, "device_memory_bytes": properties.total_memory}
        hardware |= {"gpus": torch.cuda.device_count(), "driver": driver_version()}
    return hardware


def computes_in(device: torch.device, precision: str) -> bool | None:
    """Return whether a CPU has instructions for a number format, such as "bf16"; None if that is not known.

    It emulates a format that it has no instructions for, which is slower than fp32. Only Linux says what a CPU has.
    """
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    needed = CPU_FLAGS.get(precision)
    if device.type != "cpu" or not flags or needed is None:
        return None
    return not needed.isdisjoint(flags.split())


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python, of CUDA, cuDNN and NCCL, and of the packages that matter; None where not there."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions["cudnn"] = str(torch.backends.cudnn.version() or "") or None
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated memory on CUDA, else the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where NVML, which knows it, does not work."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    return None


def _cpuinfo(key: str) -> str:
    """Return what /proc/cpuinfo says about the first CPU under ``key``; "" if nothing."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def require_memory(loader: str, needed: int, device: torch.device, advice: str, what: str = "") -> None:
    """Raise `UserError` unless ``needed`` bytes are free on ``device``; ``what`` says for what they are needed."""
    free = free_bytes(device)
    if needed > free:
        needs = f"--loader {loader} needs {needed / 1e9:.2f} GB on {device}{what}"
        raise UserError(f"{needs}, but {free / 1e9:.2f} GB are free; {advice}")


def free_bytes(device: torch.device) -> int:
    """Return the free memory in bytes: on CUDA of ``device``, else the smallest limit of the machine and the job.

    Slurm and containers limit a job by a control group; the kernel kills a process that goes beyond, without a message.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left in each control group (version 2) with a limit that this process is in."""
    own = OWN_CGROUP.read_text().strip().rpartition("::")[2] if OWN_CGROUP.exists() else ""
    group = CGROUPS / own.lstrip("/")
    for folder in (group, *group.parents):  # a container sees only some of them, from the top
        with suppress(OSError, ValueError):  # not there, or "max"
            maximum, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield maximum - used + int(cache.get("inactive_file", 0))
