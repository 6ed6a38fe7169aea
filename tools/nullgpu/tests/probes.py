"""What test_command.py runs on null GPUs, many things in one process, because importing torch takes seconds.

    python probes.py alone FILE      # one process on a GPU of 1 GiB
    python probes.py ranks FILE      # pairs of ranks on two GPUs of 2 TiB, with values

FILE gets what was found, as JSON.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch
import torch._dynamo  # the forks would import it otherwise, each of them
import torch.distributed as dist

MB = 1 << 20
Found = dict[str, Any]


def error_of(function: Callable[[], object]) -> str:
    """Return the message of the error that a function raises, and of the error before it."""
    try:
        function()
    except Exception as error:
        before = f" after {error.__context__}" if error.__context__ else ""
        return f"{type(error).__name__}: {error}{before}"
    return "no error"


def megabytes(number: int) -> torch.Tensor:
    """Return a tensor of this size on the GPU."""
    return torch.empty(number * MB, dtype=torch.uint8, device="cuda")


# ---- one process


def memory() -> Found:
    """Return free and used memory before, with and after a tensor of 100 MiB, as CUDA and as NVML see it."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def free_and_used() -> list[int]:
        return [torch.cuda.mem_get_info()[0] // MB, pynvml.nvmlDeviceGetMemoryInfo(handle).used // MB]

    found: Found = {"total": torch.cuda.mem_get_info()[1] // MB, "before": free_and_used()}
    tensor = megabytes(100)
    found["with"] = free_and_used()
    del tensor
    torch.cuda.empty_cache()
    utilization = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return found | {"after": free_and_used(), "devices": pynvml.nvmlDeviceGetCount(), "utilization": utilization}


ASKED = (
    *("AccountingMode", "ApplicationsClock:0", "BAR1MemoryInfo", "Brand", "BoardPartNumber", "ClockInfo:0"),
    *("ComputeMode", "ComputeRunningProcesses", "CpuAffinity:4", "CpuAffinityWithinScope:4:0", "CudaComputeCapability"),
    *("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "CurrentClocksThrottleReasons", "DecoderUtilization"),
    *("DisplayActive", "DisplayMode", "EccMode", "EncoderUtilization", "EnforcedPowerLimit", "FanSpeed"),
    *("GraphicsRunningProcesses", "Index", "MPSComputeRunningProcesses", "MaxClockInfo:1", "MaxPcieLinkGeneration"),
    *("MaxPcieLinkWidth", "MemoryAffinity:1:0", "MemoryInfo", "MemoryInfo:0x02000028", "MigMode", "MinorNumber"),
    *("Name", "NumaNodeId", "NvLinkState:0", "PciInfo", "PcieThroughput:0", "PerformanceState", "PersistenceMode"),
    *("PowerManagementLimit", "PowerManagementLimitConstraints", "PowerUsage", "RetiredPages:0", "Serial"),
    *("SupportedMemoryClocks", "Temperature:0", "TemperatureThreshold:0", "TotalEccErrors:0:0"),
    *("TotalEnergyConsumption", "UUID", "UtilizationRates", "VbiosVersion", "Architecture", "Attributes"),
)
"""what monitors ask NVML of a GPU: nvmlDeviceGet..., with its further arguments"""


def monitors() -> dict[str, str]:
    """Return what NVML answers to each question of `ASKED`, or the name of the error."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {}
    for question in ASKED:
        name, *words = question.split(":")
        try:
            answer = getattr(pynvml, f"nvmlDeviceGet{name}")(handle, *(int(word, 0) for word in words))
            found[question] = str(list(answer) if name.startswith(("CpuAffinity", "MemoryAffinity")) else answer)
        except pynvml.NVMLError as error:
            found[question] = type(error).__name__
    return found


def profiler() -> list[str]:
    """Return the kernels that torch.profiler sees in the sum of two tensors."""
    tensor = torch.ones(8, device="cuda")
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        tensor + tensor
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def out_of_memory() -> Found:
    """Ask for more memory than there is, then for less."""
    found: Found = {"error": error_of(lambda: megabytes(2048))}
    return found | {"allocated_then": megabytes(1).numel() // MB}


def item_in_graph() -> str:
    """Return the error of a wait during the capture of a graph."""
    tensor = torch.ones(8, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.sum().item()

    return error_of(capture)


def alone() -> Found:
    """Return what all probes of one process find."""
    return {one.__name__: one() for one in (memory, monitors, profiler, out_of_memory, item_in_graph)}


# ---- pairs of ranks: forks, which share the import of torch


def send_and_receive(rank: int) -> object:
    """Send numbers from rank 0 to rank 1, and return what has arrived."""
    numbers = torch.arange(3.0, device="cuda") + 1
    if rank == 0:
        dist.send(numbers, 1)
        return None
    received = torch.zeros_like(numbers)
    dist.recv(received, 0)
    return received.tolist()


def different_collectives(rank: int) -> object:
    """Call different collectives; return the error."""
    numbers = torch.ones(4, device="cuda")
    return error_of(lambda: dist.all_reduce(numbers) if rank == 0 else dist.broadcast(numbers, 0))


def different_sizes(rank: int) -> object:
    """Reduce tensors of different sizes; return the error."""
    numbers = torch.ones(4 + rank, device="cuda")
    return error_of(lambda: dist.all_reduce(numbers))


def rank_dies(rank: int) -> object:
    """End rank 1, for which rank 0 waits; return its error."""
    if rank == 1:
        os._exit(3)
    return error_of(lambda: dist.all_reduce(torch.ones(4, device="cuda")))


def pair(probe: Callable[[int], object], new_backend: bool) -> list[object]:
    """Run a probe on two ranks; return what each has found, and the status of a rank that has found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork(lambda rank=rank: of_rank(probe, rank, Path(folder), new_backend)) for rank in (0, 1)]
        statuses = {}
        for _ in ranks:  # whichever ends first: a process that has ended counts as alive until somebody waits for it
            process, status = os.wait()
            statuses[process] = os.waitstatus_to_exitcode(status)
        files = [Path(folder, f"found{rank}") for rank in (0, 1)]
        return [
            json.loads(file.read_text()) if file.exists() else statuses[rank]
            for file, rank in zip(files, ranks, strict=True)
        ]


def of_rank(probe: Callable[[int], object], rank: int, folder: Path, new_backend: bool) -> None:
    """Join the other rank, run the probe, and note what it has found."""
    os.environ["TORCH_DIST_USE_NCCL2"] = str(int(new_backend))
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(1, device="cuda"))
    (folder / f"found{rank}").write_text(json.dumps(probe(rank)))


def fork(function: Callable[[], None]) -> int:
    """Run a function in a fork; return its process id."""
    if process := os.fork():
        return process
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(function: Callable[[], None]) -> int:
    """Run a function in a fork; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(function), 0)[1])


def more_than_the_host_has(file: Path) -> None:
    """Ask for 1 TiB, which Linux gives to a process as long as it does not write to it; note the error, and go on."""
    found = {"error": error_of(lambda: megabytes(1 << 20)), "again": error_of(lambda: megabytes(1 << 20))}
    file.write_text(json.dumps(found | {"value": (megabytes(100) + 1)[:3].tolist()}))


def segments(file: Path) -> None:
    """Note the segments of the allocator after allocations that grow, with expandable segments."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    tensors = [megabytes(50), megabytes(100), megabytes(200)]
    found = [(one["is_expandable"], one["total_size"] // MB) for one in torch.cuda.memory_snapshot()]
    file.write_text(json.dumps([found, len(tensors), torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]]))


def in_fork(probe: Callable[[Path], None], file: Path) -> Any:  # noqa: ANN401
    """Run a probe in a fork; return what it has noted in the file."""
    assert status_of(lambda: probe(file)) == 0
    return json.loads(file.read_text())


def ranks(file: Path) -> Found:
    """Return what all probes of ranks find."""
    found: Found = {probe.__name__: in_fork(probe, file) for probe in (more_than_the_host_has, segments)}
    for probe in (send_and_receive, different_collectives, different_sizes, rank_dies):
        for new_backend in (False, True):
            found[f"{probe.__name__} {new_backend}"] = pair(probe, new_backend)
    return found


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.write_text(json.dumps({"alone": alone, "ranks": lambda: ranks(target)}[sys.argv[1]]()))
