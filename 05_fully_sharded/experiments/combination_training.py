"""How composition.py describes a combination, trains with it, and observes what comes of it; see combinations.py."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute

from lab.collectives import mean_over_ranks
from small_training import (
    LESSON,
    batches,
    make_model,
    make_optimizer,
    part_of,
    whole_weights,
)
from tensor_parallel import Collectives, SplitBlock, fused_names
from workshop.models.vit import Block, VisionTransformer

DEPTH = 2
MAX_NORM = 0.5
"""of the gradients, where they are clipped; they are larger than this in each step"""


@dataclass(frozen=True)
class Process:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    compiler: str
    """backend of torch.compile"""


@dataclass
class Outcome:
    """What came of a combination."""

    losses: list[float] | None = None
    """of each step, the mean over all ranks; None: nothing was trained that one process could be compared with"""
    weights: dict[str, torch.Tensor] | None = None
    """after the last step, whole, by the names of the lesson's model"""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Combination:
    """Something to try."""

    group: str
    name: str
    run: Callable[[Process], Outcome]
    sixteen_bits: bool = False
    """whether it computes in 16 bits, so that losses are close at best"""
    clipped: bool = False
    """whether the gradients are clipped"""


COMBINATIONS: list[Combination] = []
Runs = Callable[[Process], Outcome]


def combination(group: str, name: str, *, sixteen_bits: bool = False, clipped: bool = False) -> Callable[[Runs], Runs]:
    """Add a function to the combinations."""

    def add(run: Runs) -> Runs:
        COMBINATIONS.append(Combination(group, name, run, sixteen_bits, clipped))
        return run

    return add


def model_for() -> VisionTransformer:
    """Return the lesson's vision transformer with two blocks."""
    return make_model(DEPTH)


def shard(model: nn.Module, **options: Any) -> nn.Module:  # noqa: ANN401
    """Shard each block and then the rest, as the lesson does; return the model."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: nn.Module,
    process: Process,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    before_part: Callable[[bool], None] | None = None,
    max_norm: float | None = None,
    same_batch: bool = False,
    count: bool = True,
) -> Outcome:
    """Train for the steps of small_training.py and return the outcome.

    Args:
        model: divided over the ranks.
        process: this one, among the others.
        optimizer: over the model's weights (default: AdamW).
        scaler: for gradients in fp16.
        autocast: format to compute in with `torch.autocast`.
        accumulate: parts that the samples of a rank are divided into; the gradients of all parts are added up.
        before_part: called before each of these parts, with whether it is the last one.
        max_norm: of the gradients; larger ones are clipped.
        same_batch: all ranks have the same samples, as ranks of one tensor-parallel group must.
        count: count the collectives of the last step. (A model that is compiled must not be compiled while counting.)
    """
    optimizer = optimizer or make_optimizer(model)
    scaler = scaler or torch.amp.GradScaler(process.device.type, enabled=False)
    losses: list[float] = []
    facts: dict[str, Any] = {}
    every_batch = list(batches())
    for step, batch in enumerate(every_batch, start=1):
        images, classes = part_of(batch, 0, 1) if same_batch else part_of(batch, process.rank, process.world_size)
        total = torch.zeros(())
        counted = Collectives() if count and step == len(every_batch) else None
        with counted or contextlib.nullcontext():
            for number, (part, part_classes) in enumerate(
                zip(images.chunk(accumulate), classes.chunk(accumulate), strict=True), start=1
            ):
                if before_part is not None:
                    before_part(number == accumulate)
                with torch.autocast(process.device.type, autocast, enabled=autocast is not None):
                    outputs = model(part)
                loss = LESSON.loss_function(outputs.float(), part_classes) / accumulate
                scaler.scale(loss).backward()
                total += loss.detach()
        if counted is not None:
            facts |= counted.counts
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            facts |= {"norm": round(float(norm), 4), "norm is a": type(norm).__name__}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
    weights = whole_weights(model)
    return Outcome(losses, fused_names(weights) if any(".attention.q." in name for name in weights) else weights, facts)


def with_moved(start: dict[str, torch.Tensor], outcome: Outcome) -> Outcome:
    """Add the share of the weights that training has changed."""
    assert outcome.weights is not None
    moved = sum(int((outcome.weights[name] != tensor).sum()) for name, tensor in start.items())
    outcome.facts["weights that moved"] = f"{moved / sum(tensor.numel() for tensor in start.values()):.0%}"
    return outcome


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a block of the vision transformer."""
    return isinstance(module, Block | SplitBlock)


def recompute_block(block: nn.Module) -> None:
    """Have a block computed again in backward; torch.compile does not look into such a block."""
    block.forward = partial(recompute, block.forward, use_reentrant=False)


def recompute_in_function(block: nn.Module) -> None:
    """Have a block computed again in backward; torch.compile compiles the function, and the block in it."""
    forward = block.forward

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return recompute(forward, x, use_reentrant=False)

    block.forward = recomputed


def kept_bytes(model: nn.Module, process: Process) -> int:
    """Return the bytes that forward keeps for backward, weights left out."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in parameters}:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    images, classes = part_of(next(batches()), process.rank, process.world_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = LESSON.loss_function(model(images), classes)
    loss.backward()
    model.zero_grad()
    return sum(kept.values())


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Give a temporary folder that all ranks of this machine use."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


def compiled_graphs() -> dict[str, int]:
    """Return how many graphs torch.compile has made since the last call, and where it has divided them."""
    from torch._dynamo.utils import counters

    facts = {"graphs": counters["stats"]["unique_graphs"], "graph breaks": sum(counters["graph_break"].values())}
    counters.clear()
    return facts
