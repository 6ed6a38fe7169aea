"""Run by test_emulated_scaling.py as several ranks: rank 0 prints, as JSON, what they found together."""

# ruff: noqa: E402, the lesson's experiments are found only after the path is set
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "03_ddp" / "experiments")]

from emulated_ranks import Config, wrap
from workshop.distributed import AllReduceCounter

from lab.emulated_gpu import EmulatedGPU
from lab.process_group import process_group

CONFIG = Config(layers=4, gradient_mb=0.01, milliseconds=0.001)


def gradients(model: DistributedDataParallel, inputs: torch.Tensor) -> list[list[float]]:
    """The gradients of each rank after one step, all of a rank in a row."""
    model.zero_grad()
    model(inputs).sum().backward()
    mine = torch.cat([weights.grad for weights in model.parameters()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [rank.tolist() for rank in found]


with process_group() as (rank, world_size, _):
    facts = {}
    inputs = torch.full((3,), rank + 1.0)
    for name, buckets in {"one_bucket": 1, "many_buckets": CONFIG.layers}.items():
        model = wrap(CONFIG, buckets, EmulatedGPU())
        counter = AllReduceCounter(model)
        for _ in range(3):
            ranks = gradients(model, inputs)
        facts[name] = {
            "equal": all(other == ranks[0] for other in ranks),
            "first": ranks[0][0],
            "all_reduces": counter.per_step()["all_reduces_per_step"],
            "bytes": counter.per_step()["all_reduce_bytes_per_step"],
        }
        with model.no_sync():
            ranks = gradients(model, inputs)
        facts[name]["no_sync"] = [found[0] for found in ranks]
    if rank == 0:
        print(json.dumps(facts))
