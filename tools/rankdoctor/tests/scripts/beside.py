"""A correct script for DDP that uses a tool, named by its first argument, which changes PyTorch as the doctor does."""

import contextlib
import faulthandler
import os
import pdb
import signal
import sys
import trace
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

tool = sys.argv[1]


@contextlib.contextmanager
def used() -> Iterator[object]:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    if tool == "profiler":
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True) as recorder:
            yield recorder
        recorder.export_chrome_trace(f"trace{dist.get_rank()}.json")
    elif tool == "scheduled_profiler":
        with profile(schedule=schedule(wait=1, warmup=1, active=2, repeat=1), with_flops=True) as recorder:
            yield recorder
    elif tool == "old_profiler":
        with torch.autograd.profiler.profile(use_device="cuda", with_stack=True) as recorder:
            yield None
        assert recorder.key_averages()
    elif tool == "anomaly":
        with torch.autograd.detect_anomaly(check_nan=True):
            yield None
    elif tool == "memory_history":
        torch.cuda.memory._record_memory_history(max_entries=1000)
        yield None
        torch.cuda.memory._dump_snapshot(f"memory{dist.get_rank()}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    elif tool == "faulthandler":
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        faulthandler.dump_traceback_later(300)
        yield None
        faulthandler.cancel_dump_traceback_later()
    elif tool == "settrace":  # as coverage and debuggers do
        lines = trace.Trace(count=1, trace=0)
        sys.settrace(lines.globaltrace)
        yield None
        sys.settrace(None)
    else:
        yield None


def network() -> nn.Module:
    norm = nn.SyncBatchNorm(8) if tool == "sync_norm" else nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3)).cuda()
    if tool == "converted_norm":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if tool == "compiled":
        net.compile(mode="max-autotune")
        net[3] = torch.compile(net[3], fullgraph=True)
    return net


def main() -> None:
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)
    model = DistributedDataParallel(network(), device_ids=[local])
    torch.manual_seed(1 + rank)
    data = TensorDataset(torch.randn(128, 6, generator=torch.Generator().manual_seed(1)), torch.arange(128) % 3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with used() as recorder:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()
                if tool == "scheduled_profiler":
                    recorder.step()
                if tool == "debugger":
                    breakpoint()
                    pdb.set_trace()
    if "norm" in tool:
        means = [m.running_mean for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        gathered = [torch.zeros_like(means[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, means[0])
        assert torch.equal(gathered[0], gathered[1]), "statistics are those of all ranks"
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
