"""What the experiments on ranks share: models that the lessons' own scripts build, and counted collectives."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from lab.launching import load_script
from workshop.paths import REPOSITORY
from workshop.profiling.all_reduce_counter import AllReduceCounter

LESSON_04 = load_script(REPOSITORY / "04_mixed_precision")
LESSON_05 = load_script(REPOSITORY / "05_fully_sharded")
CPU = torch.device("cpu")
KINDS = {"allgather": "all-gathers", "reducescatter": "reduce-scatters", "allreduce": "all-reduces"}
"""what torch calls the collectives, without its underscores, and what the tables call them"""
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sharded(rank: int, world_size: int, **flags: object) -> tuple[FSDPModule, torch.optim.Optimizer, Step]:
    """Return lesson 05's model, its optimizer and its training step; ``flags`` as those of its train.py."""
    config = LESSON_05.Config(model="vit", optimizer="adamw", **flags)
    torch.manual_seed(0)  # for the weights that rank 0 draws
    model = LESSON_05.shard_model(config, rank, CPU, world_size)
    optimizer = LESSON_05.make_optimizer(config, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return model, optimizer, partial(LESSON_05.train_step, config, model, optimizer, scaler)


def replicated(**flags: object) -> tuple[nn.Module, torch.optim.Optimizer, Step, AllReduceCounter]:
    """Return lesson 04's model, its optimizer, its training step, and what counts the all-reduces of the latter."""
    config = LESSON_04.Config(model="vit", optimizer="adamw", precision="fp32", **flags)
    torch.manual_seed(0)
    model = LESSON_04.make_model(config)
    ddp_model = DistributedDataParallel(model)
    optimizer = LESSON_04.make_optimizer(config, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = partial(LESSON_04.train_step, config, ddp_model, optimizer, scaler)
    return model, optimizer, step, AllReduceCounter(ddp_model)


def batches_of(rank: int, batch_size: int, count: int) -> list[Batch]:
    """Return batches of random images (N, 1, 28, 28) and labels (N,), which differ from those of the other ranks."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(count, batch_size, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (count, batch_size), generator=generator)
    return list(zip(images, labels, strict=True))


def count_collectives(step: Callable[[], object]) -> dict[str, int]:
    """Return how often this rank called each collective during ``step``.

    DDP calls its all-reduces from C++, where this cannot see them.
    """
    with CommDebugMode() as mode:
        step()
    counts = dict.fromkeys(KINDS.values(), 0)
    for operation, count in mode.get_comm_counts().items():
        plain = str(operation).replace("_", "")  # torch has several operations for each of them
        kind = next((shown for name, shown in KINDS.items() if name in plain), str(operation))
        counts[kind] = counts.get(kind, 0) + count
    return counts


def whole(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all numbers of these tensors as one vector (n,). Sharded ones are gathered: all ranks must call this."""
    return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).detach().float().flatten() for t in tensors])
