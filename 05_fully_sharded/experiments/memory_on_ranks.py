"""How many bytes of tensors two ranks really allocate at most in a training step, each way of sharing the model.

    torchrun --standalone --nproc-per-node 2 experiments/memory_on_ranks.py MODEL FILE

`will_it_fit.py --check true` starts this script, which writes five peaks to FILE, and compares them with its forecast.
"""

import gc
import json
import operator
import sys
import time
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from lab.allocations import peak_of, recorder, trace_events
from lab.process_group import process_group
from memory_model import LESSON, UPDATES, Batch, Setup, build, mesh_of, shard, workload
from tensor_bytes import local
from workshop.errors import run_reporting_user_errors

BATCH_SIZE, RANKS = 2, 2
CONFIGURATIONS = (("ddp", False), ("blocks", False), ("keep", False), ("root", False), ("blocks", True))
"""way and activation checkpointing of each measurement"""
COLLECTIVES = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
)
"""that FSDP2 calls; the first two are names since torch 2.15 of the next two"""
COLLECTIVE = "collective"
"""name of each call of these in the profiler's trace"""


def setups(model: str, update: str) -> list[Setup]:
    """Return what is measured, in this order."""
    same = {"model": model, "batch_size": BATCH_SIZE, "ranks": RANKS, "update": update}
    return [Setup(**same, way=way, checkpointing=checkpointing) for way, checkpointing in CONFIGURATIONS]


def name_calls(name: str) -> None:
    """Make a collective of `torch.distributed` wait for its end, and give its calls a name in the profiler's trace.

    Gloo's thread may keep the tensors a little longer, and the profiler would not see that it frees them: wait for it.
    """
    collective = getattr(dist, name)

    @wraps(collective)
    def call(*args: Any, **keywords: Any) -> None:  # noqa: ANN401
        tensors = [value for value in (*args, *keywords.values()) if isinstance(value, torch.Tensor)]
        uses = [tensor._use_count() for tensor in tensors]
        with record_function(COLLECTIVE):
            work = collective(*args, **keywords)
            if work is not None:
                work.wait()
            del work
            until = time.monotonic() + 5  # a later PyTorch may keep one for good
            while any(map(operator.gt, (tensor._use_count() for tensor in tensors), uses)) and time.monotonic() < until:
                time.sleep(1e-4)

    setattr(dist, name, call)


def end_copies_with_collectives(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a trace with the end of each collective as the time when its own copies are freed.

    Gloo copies what it sends and receives. A thread of its own may free the copies, which the profiler does not see.
    """
    found: list[dict[str, Any]] = []
    copies: dict[int, int] = {}  # bytes by address
    freed_here: set[int] = set()
    end = 0.0  # of the latest collective
    for event in events:
        if event["ts"] > end:
            for address, count in copies.items():
                found.append({"name": "[memory]", "ts": end, "args": {"Bytes": -count, "Addr": address}})
            freed_here |= copies.keys()
            copies = {}
        if event["name"] == COLLECTIVE and "dur" in event:
            end = event["ts"] + event["dur"]
        if event["name"] == "[memory]":
            count, address = event["args"]["Bytes"], event["args"]["Addr"]
            if count > 0:
                freed_here.discard(address)  # another tensor has its place now
                if event["ts"] <= end:
                    copies[address] = count
            elif address in freed_here:
                freed_here.discard(address)
                continue
            else:
                copies.pop(address, None)
        found.append(event)
    return found


def prepare(setup: Setup, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Return model, optimizer and batch of this rank."""
    torch.manual_seed(0)
    with torch.device("meta"):  # as in the lesson: no rank ever holds the whole model, unless it is DDP's
        model = build(setup)
    if setup.way != "ddp":
        model = shard(setup, model, mesh_of(setup, device.type))
    model.to_empty(device=device)
    for weight in model.parameters():
        nn.init.normal_(local(weight), std=0.02)  # only the bytes matter
    if setup.way == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **UPDATES[setup.update])
    inputs, targets = workload(setup.model).batch(setup.batch_size)
    return model, optimizer, (inputs.to(device), targets.to(device))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Make a training step as the lesson does."""
    inputs, targets = batch
    outputs = model(inputs)
    LESSON.loss_function(outputs.float(), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(setup: Setup, device: torch.device) -> int:
    """Return the most bytes of tensors on this rank in the third step, after which nothing new is kept."""
    gc.collect()  # the model before: FSDP2's modules refer to each other in circles
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model, optimizer, batch = prepare(setup, device)
    for _ in range(2):
        step(model, optimizer, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step(model, optimizer, batch)
        return torch.cuda.max_memory_allocated(device) - before
    kept = [*model.parameters(), *batch]
    kept += [value for state in optimizer.state.values() for value in state.values()]
    level = sum(local(tensor).nbytes for tensor in kept)
    if setup.way == "ddp":  # its buckets hold all gradients, from the first step on
        level += sum(weight.nbytes for weight in model.parameters())
    with recorder() as recorded:
        step(model, optimizer, batch)
    return peak_of(end_copies_with_collectives(trace_events(recorded)), level)


def main() -> None:
    """Measure; rank 0 writes the largest peak over the ranks of each setup."""
    with process_group() as (rank, world_size, device):
        assert world_size == RANKS
        model, file = sys.argv[1:]
        update = "loop" if device.type == "cpu" else "foreach"  # PyTorch's default there
        if device.type == "cpu":
            for name in filter(partial(hasattr, dist), COLLECTIVES):
                name_calls(name)
        else:  # so that the memory that libraries allocate once, and keep, is not counted below
            measure(setups(model, update)[0], device)
        peaks = []
        for setup in setups(model, update):
            peak = torch.tensor(measure(setup, device), device=device)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            peaks.append(int(peak))
        if rank == 0:
            Path(file).write_text(json.dumps({"update": update, "bytes": peaks}))


if __name__ == "__main__":
    run_reporting_user_errors(main)
