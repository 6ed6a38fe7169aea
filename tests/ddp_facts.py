"""Run by test_ddp.py as several ranks: rank 0 prints, as JSON, what they found out together."""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workshop.distributed.process_group import process_group
from workshop.distributed.ranks import ONE_PROCESS, Ranks

from workshop.distributed.all_reduce_counter import AllReduces, forward_sync_buffers
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import EpochOrder
from workshop.profiling.throughput import InStep, max_over_ranks

GLOBAL_BATCH = 16
MEGABYTE = 2**20


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))


def gradients(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def all_gathered(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def facts(ranks: Ranks, device: torch.device) -> dict:
    """What the ranks find: gradients against those of one rank, counts, and the order of the samples."""
    torch.manual_seed(ranks.rank)  # a difference that must not matter
    images = torch.randn(103, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(103) % 10
    found = {}

    alone, options = small_model(), {"gradient_as_bucket_view": True, "static_graph": True}
    shared = DistributedDataParallel(small_model(), **options, **forward_sync_buffers(True))
    counter = AllReduces(shared)
    order = EpochOrder(96, GLOBAL_BATCH // ranks.world_size, ranks, seed=1, shuffle=True)
    everything = EpochOrder(96, GLOBAL_BATCH, ONE_PROCESS, seed=1, shuffle=True)
    found["gradient_error"] = max(
        (gradients(shared, images[own], labels[own]) - gradients(alone, images[all_], labels[all_])).abs().max().item()
        for own, all_ in zip(order.batches(), everything.batches(), strict=True)
    )
    found |= counter.per_step() | {"parameters": sum(parameter.numel() for parameter in alone.parameters())}

    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # of 1 MiB each
    for bucket_cap_mb in (1, 2, 100):
        buckets = DistributedDataParallel(layers, bucket_cap_mb=bucket_cap_mb)
        counter = AllReduces(buckets)
        for _ in range(3):
            buckets(torch.ones(1, 512)).sum().backward()
        found[f"buckets of {bucket_cap_mb} MiB"] = [counter.calls, counter.bytes / MEGABYTE]

    silent = DistributedDataParallel(small_model())
    counter = AllReduces(silent)
    with silent.no_sync():
        own = gradients(silent, images[ranks.rank :: 4], labels[ranks.rank :: 4])
    found["without communication"] = counter.per_step()
    found["own gradients"] = torch.equal(own, gradients(alone, images[ranks.rank :: 4], labels[ranks.rank :: 4]))

    lesson = runpy.run_path(sys.argv[1], run_name="lesson")
    alone.load_state_dict(small_model().state_dict())
    val_order = EpochOrder(103, 5, ranks, seed=1, shuffle=False)
    loader = MemoryLoader(images, labels, val_order, Unchanged(), pin_memory=False)
    loss, accuracy = lesson["evaluate"](lesson["Config"](), alone, loader, device)
    with torch.no_grad():
        scores = alone(images)
    found["right answers"] = [round(accuracy * 103, 6), (scores.argmax(dim=1) == labels).sum().item()]
    found["val_loss"] = [loss, F.cross_entropy(scores, labels).item()]

    order = EpochOrder(103, 4, ranks, seed=1, shuffle=True)
    for epoch in (1, 2):
        order.set_epoch(epoch)
        found[f"epoch {epoch}"] = all_gathered([index for _, batch in order for index in batch])
    order = EpochOrder(96, 4, ranks, seed=1, shuffle=True)
    batches = iter(InStep(MemoryLoader(images, labels, order, Unchanged(), pin_memory=False), device))
    asked, got = [], []
    for step in range(len(order)):
        time.sleep(0.003 * ((step + ranks.rank) % 2))  # now one rank is the slowest, now another
        asked.append(time.monotonic())  # the ranks share this machine and its clock
        next(batches)
        got.append(time.monotonic())
    found |= {"asked for a batch": all_gathered(asked), "got it": all_gathered(got)}
    found["slowest"] = all_gathered(max_over_ranks(float(ranks.rank), device))
    found["batches in validation"] = all_gathered(len(val_order))
    return found


class Unchanged:
    """A transform that does nothing."""

    def set_epoch(self, epoch: int) -> None: ...

    def __call__(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return images


if __name__ == "__main__":
    os.chdir(Path(sys.argv[1]).parent)
    with process_group() as (ranks, device):
        found = facts(ranks, device)
        if ranks.is_main:
            print(json.dumps(found))
