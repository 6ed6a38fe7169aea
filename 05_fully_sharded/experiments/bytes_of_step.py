"""The bytes of rank 0 in a training step, by PyTorch's own CUDA allocator, for each setup of a file.

`memory_model.py` starts this script on a null GPU, or on the GPU of this machine, and gives it two files: the setups,
and where the answers go.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mean_loss import mean_loss
from memory_model import UPDATES, Batch, Prediction, Setup, build, mesh_of, shard, workload
from tensor_bytes import local

STEPS = 3
"""The optimizer's state is made in the first step, and DDP's buckets get their order in it."""
DEVICE = torch.device("cuda", 0)
WATCHDOG_SECONDS = 0.5
"""After the first step DDP makes new buckets. NCCL's watchdog, which looks every 0.1 s, keeps the old ones so long."""
WARM_UP = Setup(model="gpt_tiny", depth=1)
"""is measured first, so that what libraries allocate once, and keep, is not counted in the first setup only"""


def prepare(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of this rank; the weights are not drawn, because only their bytes matter."""
    with torch.device("meta"):
        model: nn.Module = build(setup)
    if setup.way not in ("alone", "ddp"):
        model = shard(setup, model, mesh_of(setup, DEVICE.type))
    model.to_empty(device=DEVICE)
    if setup.way == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # as the lesson's script
    return model, torch.optim.AdamW(model.parameters(), **UPDATES[setup.update])


def train_step(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    end_of: Callable[[str], None],
) -> None:
    """Make a step as the lesson's `train_step` does; call ``end_of`` with the name of each part that has ended."""
    inputs, targets = batch
    parts = zip(inputs.tensor_split(setup.parts), targets.tensor_split(setup.parts), strict=True)
    sharded = isinstance(model, FSDPModule)
    autocast = setup.precision == "bf16" and not sharded  # for DDP, as in lesson 04; FSDP2 has its policy instead
    for number, (part, part_targets) in enumerate(parts, start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(setup.reduce_each or number == setup.parts)
            model.set_reshard_after_backward(number == setup.parts or not setup.keep_weights)
        with torch.autocast(DEVICE.type, torch.bfloat16) if autocast else nullcontext():
            scores = model(part)
        loss = mean_loss(scores.float(), part_targets) * (len(part) / len(inputs))
        del scores  # the lesson's script has no name for them either
        end_of("forward")
        loss.backward()
        end_of("backward")
    optimizer.step()
    end_of("optimizer")


def measure(setup: Setup) -> Prediction:
    """Make the steps; return the bytes of the last one.

    Raises:
        OutOfMemoryError: the GPU has less memory.
    """
    gc.collect()  # FSDP2's modules refer to each other in circles
    torch.cuda.empty_cache()
    before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    peaks: dict[str, int] = {}
    level: dict[str, int] = {}  # after the first of each part

    def end_of(part: str) -> None:
        peaks[part] = max(peaks.get(part, 0), torch.cuda.max_memory_allocated() - before)
        level.setdefault(part, torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()

    model, optimizer = prepare(setup)
    weights = list(model.parameters())
    on_cpu = workload(setup.model).batch(setup.batch_size, setup.sequence_length)
    batch = (on_cpu[0].to(DEVICE), on_cpu[1].to(DEVICE))
    for _ in range(STEPS):
        optimizer.zero_grad()
        if setup.way == "ddp":
            time.sleep(WATCHDOG_SECONDS)
        peaks.clear()
        level.clear()
        end_of("the step before")
        train_step(setup, model, optimizer, batch, end_of)
    states = [value for state in optimizer.state.values() for value in state.values()]
    stored = level["the step before"]
    return Prediction(
        parameters=sum(weight.numel() for weight in weights),
        weights=sum(local(weight).nbytes for weight in weights),
        gradients=sum(local(weight.grad).nbytes for weight in weights if weight.grad is not None),
        optimizer=sum(local(value).nbytes for value in states if isinstance(value, torch.Tensor)),
        stored=stored,
        kept=level["forward"] - stored,
        peaks={part: peaks[part] for part in ("forward", "backward", "optimizer")},
        reserved=torch.cuda.memory_reserved() - reserved_before,
    )


def measure_as_rank(setup: Setup) -> Prediction | None:
    """Measure as rank 0 of as many ranks as the setup has; return None if the memory of the GPU is not enough."""
    if setup.way != "alone":
        # The same backend as in train.py, which says why.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=setup.ranks, device_id=DEVICE)
    try:
        return measure(setup)
    except torch.OutOfMemoryError:
        return None
    finally:
        if setup.way != "alone":
            dist.destroy_process_group()


def main() -> None:
    """Read the setups, and write their bytes."""
    asked, answered = map(Path, sys.argv[1:])
    measure(WARM_UP)
    found = [measure_as_rank(Setup(**one)) for one in json.loads(asked.read_text())]
    answered.write_text(json.dumps([one and asdict(one) for one in found]))


if __name__ == "__main__":
    main()
