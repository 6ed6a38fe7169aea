"""What the experiments on ranks share: the lesson's model, sharded or under DDP, and counted collectives."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from lab.launching import load_script
from mean_loss import mean_loss
from workshop.paths import REPOSITORY
from workshop.ranks import Ranks

LESSON = load_script(REPOSITORY / "05_fully_sharded")
CPU = torch.device("cpu")
KINDS = {"allgather": "all-gathers", "reducescatter": "reduce-scatters", "allreduce": "all-reduces"}
"""what torch calls the collectives, without its underscores, and what the tables call them"""
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sharded(
    rank: int, world_size: int, device: torch.device = CPU, **flags: object
) -> tuple[FSDPModule, torch.optim.Optimizer, Step]:
    """Return the lesson's model, its optimizer and its training step; ``flags`` as those of its train.py."""
    config = LESSON.Config(**flags)
    torch.manual_seed(0)  # for the weights that rank 0 draws
    ranks = Ranks(rank=rank, world_size=world_size, device=device)
    model = LESSON.shard_model(config, ranks)
    training = training_of(config, model, ranks)
    return model, training.optimizer, partial(mean_of_step, config, training)


def training_of(config: Any, model: nn.Module, ranks: Ranks) -> Any:  # noqa: ANN401
    """Return the lesson's training state for a model, with a constant learning rate."""
    optimizer = LESSON.make_optimizer(config, model)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.precision == "fp16")
    group = dist.new_group(backend="gloo")
    return LESSON.Training(model, optimizer, scheduler, scaler, ranks, group, LESSON.sum_of_losses)


def mean_of_step(config: Any, training: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Make the lesson's training step on one batch, and return the mean loss () over this rank's tokens."""
    loss_sum, tokens, _ = LESSON.train_step(config, training, inputs, targets)
    return loss_sum / tokens


def replicated(
    device: torch.device = CPU, **flags: object
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Step]:
    """Return the lesson's model under DDP, its optimizer and its training step; ``flags`` as those of train.py."""
    config = LESSON.Config(**flags)
    torch.manual_seed(0)
    model = DistributedDataParallel(LESSON.make_model(config).to(device))
    optimizer = LESSON.make_optimizer(config, model)
    return model, optimizer, partial(replicated_step, config, model, optimizer)


def replicated_step(
    config: Any,  # noqa: ANN401
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Train on one batch as lessons 03 and 04 do, and return its loss (); each rank updates all weights."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        scores = model(inputs)
    loss = mean_loss(scores.float(), targets)
    loss.backward()
    if config.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return loss.detach()


def batches_of(rank: int, batch_size: int, sequence_length: int, count: int = 1) -> list[Batch]:
    """Return batches of random bytes and the bytes after them, (N, T) each, which differ from those of other ranks."""
    generator = torch.Generator().manual_seed(rank)
    sequences = torch.randint(256, (count, batch_size, sequence_length + 1), generator=generator)
    return [(sequence[:, :-1], sequence[:, 1:]) for sequence in sequences]


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
