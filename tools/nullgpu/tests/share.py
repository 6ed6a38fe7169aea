"""Print, as JSON, what a process sees of the GPUs of a machine: by CUDA, NVML, values, and NCCL as rank RANK.

CUDA_VISIBLE_DEVICES=2,3 python share.py
python share.py 2,3 "" all     # the same for forks that set the variable themselves, after importing torch
"""

import json
import os
import sys
from typing import Any

import pynvml
import torch
import torch.distributed as dist


def seen() -> dict[str, Any]:
    """Return what this process sees."""
    before, available = torch.cuda.device_count(), torch.cuda.is_available()
    pynvml.nvmlInit()
    found: dict[str, Any] = {"before": before, "available": available, "machine": pynvml.nvmlDeviceGetCount()}
    if available:
        torch.cuda.init()
    count = torch.cuda.device_count()
    found |= {"count": count, "value": [(torch.ones(2, device=f"cuda:{i}") + 1).sum().item() for i in range(count)]}
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    found["bus"] = [one.pci_bus_id for one in properties]
    kept = [torch.empty((i + 1) << 26, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(found["machine"])]
    found["used"] = [pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 26 for handle in handles]
    del kept
    by_uuid = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{one.uuid}") for one in properties]
    found["index"] = [pynvml.nvmlDeviceGetIndex(handle) for handle in by_uuid]
    found["utilization"] = [torch.cuda.utilization(i) for i in range(count)]
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
        numbers = torch.tensor([2.0 ** dist.get_rank()], device="cuda")
        dist.all_reduce(numbers)
        found["sum"] = numbers.item()
        dist.destroy_process_group()
    return found


def main() -> None:
    """Print a line for this process, or for a fork with each of the given values of the variable."""
    for visible in sys.argv[1:]:
        if process := os.fork():
            os.waitpid(process, 0)
            continue
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible != "all":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        print(json.dumps(seen()), flush=True)
        os._exit(0)
    if not sys.argv[1:]:
        print(json.dumps(seen()))


if __name__ == "__main__":
    main()
