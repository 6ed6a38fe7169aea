"""Run by test_ddp.py as several ranks: rank 0 prints, as JSON, what they found together."""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workshop.loaders import DistributedBatchSampler
from workshop.loaders.memory import MemoryLoader
from workshop.profiling.all_reduce_counter import AllReduceCounter
from workshop.profiling.throughput import BarrierLoader, max_over_ranks
from workshop.ranks import Ranks

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


def sampler_of(samples: int, batch_size: int, *, shuffle: bool = True) -> DistributedBatchSampler:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return DistributedBatchSampler(samples, batch_size, rank=rank, num_replicas=world_size, shuffle=shuffle, seed=1)


def facts(rank: int, world_size: int, device: torch.device) -> dict:
    """What the ranks find: gradients compared with those of one rank, counts, and the order of the samples."""
    torch.manual_seed(rank)  # a difference that must not matter
    images = torch.randn(103, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(103) % 10
    found = {}

    alone, options = small_model(), {"gradient_as_bucket_view": True, "static_graph": True}
    shared = DistributedDataParallel(small_model(), **options)
    counter = AllReduceCounter(shared)
    sampler = sampler_of(96, GLOBAL_BATCH // world_size)
    everything = DistributedBatchSampler(96, GLOBAL_BATCH, rank=0, num_replicas=1, shuffle=True, seed=1)
    found["gradient_error"] = max(
        (gradients(shared, images[own], labels[own]) - gradients(alone, images[all_], labels[all_])).abs().max().item()
        for own, all_ in zip(sampler.batches(), everything.batches(), strict=True)
    )
    found |= counter.per_step() | {"parameters": sum(parameter.numel() for parameter in alone.parameters())}

    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # of 1 MiB each
    for bucket_cap_mb in (1, 2, 100):
        buckets = DistributedDataParallel(layers, bucket_cap_mb=bucket_cap_mb)
        counter = AllReduceCounter(buckets)
        for _ in range(3):
            buckets(torch.ones(1, 512)).sum().backward()
        found[f"buckets of {bucket_cap_mb} MiB"] = [counter.calls, counter.bytes / MEGABYTE]

    silent = DistributedDataParallel(small_model())
    counter = AllReduceCounter(silent)
    with silent.no_sync():
        own = gradients(silent, images[rank::4], labels[rank::4])
    found["without communication"] = counter.per_step()
    found["own gradients"] = torch.equal(own, gradients(alone, images[rank::4], labels[rank::4]))

    lesson = runpy.run_path(sys.argv[1], run_name="lesson")
    alone.load_state_dict(small_model().state_dict())
    val_sampler = sampler_of(103, 5, shuffle=False)
    loader = MemoryLoader(images, labels, val_sampler, Unchanged(), pin_memory=False)
    ranks = Ranks(device=device, rank=rank, world_size=world_size)
    training = lesson["Training"](SimpleNamespace(module=alone), None, None, ranks)
    loss, accuracy = lesson["evaluate"](lesson["Config"](), training, loader)
    with torch.no_grad():
        scores = alone(images)
    found["correct answers"] = [round(accuracy * 103, 6), (scores.argmax(dim=1) == labels).sum().item()]
    found["val_loss"] = [loss, F.cross_entropy(scores, labels).item()]

    sampler = sampler_of(103, 4)
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        found[f"epoch {epoch}"] = all_gathered([index for batch in sampler for _, index in batch])
    sampler = sampler_of(96, 4)
    batches = iter(BarrierLoader(MemoryLoader(images, labels, sampler, Unchanged(), pin_memory=False), device))
    asked, got = [], []
    for step in range(len(sampler)):
        time.sleep(0.003 * ((step + rank) % 2))  # now one rank is the slowest, now another
        asked.append(time.monotonic())  # the ranks share this machine and its clock
        next(batches)
        got.append(time.monotonic())
    found |= {"asked for a batch": all_gathered(asked), "got it": all_gathered(got)}
    found["longest"] = all_gathered(max_over_ranks(float(rank), device))
    found["batches in validation"] = all_gathered(len(val_sampler))
    return found


class Unchanged:
    """A transform that does nothing."""

    def set_epoch(self, epoch: int) -> None: ...

    def __call__(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return images


if __name__ == "__main__":
    os.chdir(Path(sys.argv[1]).parent)
    dist.init_process_group("gloo")
    found = facts(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
