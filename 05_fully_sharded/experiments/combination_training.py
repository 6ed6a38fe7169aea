"""How combinations.py trains with a combination, compares it with one process, and stores what comes of it."""

import contextlib
import gc
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lab import results
from lab.process_group import mean_over_ranks
from small_training import (
    LESSON,
    batches,
    largest_difference,
    make_model,
    make_optimizer,
    part_of,
    train_one_process,
    whole_weights,
)
from tensor_parallel import Collectives, fused_names
from workshop.models.gpt import GPT

DEPTH = 2
MAX_NORM = 0.5
"""of the gradients, where they are clipped; they are larger than this in each step"""
EQUAL, CLOSE = 1e-5, 1e-2
"""largest differences of the losses from one process that are called equal in 32 bits, and close in 16"""


@dataclass(frozen=True)
class Process:
    """This process among the others."""

    rank: int
    world_size: int
    compiler: str
    """backend of torch.compile"""


@dataclass
class Outcome:
    """What came of a combination."""

    losses: list[float] | None = None
    """of each step, the mean over all ranks; None: nothing was trained that one process could be compared with"""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """after the last step, whole, by the names of the lesson's model"""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Combination:
    """Something to try."""

    group: str
    name: str
    run: Callable[[Process], Outcome]
    sixteen_bits: bool
    """whether it computes in 16 bits, so that losses are close at best"""
    clipped: bool
    """whether the gradients are clipped"""


COMBINATIONS: list[Combination] = []
Runs = Callable[[Process], Outcome]


def combination(group: str, name: str, *, sixteen_bits: bool = False, clipped: bool = False) -> Callable[[Runs], Runs]:
    """Add a function to the combinations."""

    def add(run: Runs) -> Runs:
        COMBINATIONS.append(Combination(group, name, run, sixteen_bits, clipped))
        return run

    return add


def model_for() -> GPT:
    """Return the model of small_training.py with two blocks."""
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
        max_norm: of the gradients; larger ones are clipped.
        same_batch: all ranks have the same samples, as ranks of one tensor-parallel group must.
        count: count the collectives of the last step. (A model that is compiled must not be compiled while counting.)
    """
    optimizer = optimizer or make_optimizer(model)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses: list[float] = []
    facts: dict[str, Any] = {}
    for batch in batches():
        inputs, targets = part_of(batch, 0, 1) if same_batch else part_of(batch, process.rank, process.world_size)
        total = torch.zeros(())
        counted = Collectives()
        with counted if count else contextlib.nullcontext():
            parts = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
            for number, (part, part_targets) in enumerate(parts, start=1):
                if accumulate > 1:
                    model.set_requires_gradient_sync(number == accumulate)
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    scores = model(part)
                loss = LESSON.loss_function(scores.float(), part_targets) / accumulate
                scaler.scale(loss).backward()
                total += loss.detach()
        facts |= {f"{kind.replace('_', '-')}s": number for kind, number in counted.counts.items()}  # of the last step
        if max_norm is not None:
            scaler.unscale_(optimizer)
            facts["norm"] = round(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)), 4)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
    return Outcome(losses, fused_names(whole_weights(model)), facts)


def with_moved(outcome: Outcome) -> Outcome:
    """Add the share of the weights that training has changed."""
    start = model_for().state_dict()
    moved = sum(int((outcome.weights[name] != tensor).sum()) for name, tensor in start.items())
    outcome.facts["weights that moved"] = f"{moved / sum(tensor.numel() for tensor in start.values()):.0%}"
    return outcome


def kept_megabytes(model: nn.Module, process: Process) -> float:
    """Return what forward keeps for backward, weights left out."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in parameters}:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs, targets = part_of(next(batches()), process.rank, process.world_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = LESSON.loss_function(model(inputs), targets)
    loss.backward()
    model.zero_grad()
    return round(sum(kept.values()) / 1e6, 2)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Give a temporary folder that all ranks of this machine use."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


def try_combination(tried: Combination, process: Process, alone: dict[bool, Outcome]) -> list[results.Cell]:
    """Train with a combination; return its row: name, result, and what else was seen.

    Args:
        tried: the combination.
        process: this one, among the others.
        alone: losses and weights of one process, with and without clipped gradients.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = tried.run(process)
    except Exception as error:  # whatever a combination fails with is its result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return [tried.name, "**fails**", f"`{type(error).__name__}: {lines[0] if lines else ''}"[:110] + "`"]
    seen = ", ".join(f"{name}: {value}" for name, value in outcome.facts.items())
    expected = alone[tried.clipped]
    if outcome.losses is None or expected.losses is None:
        return [tried.name, "works", seen]
    difference = max(abs(a - b) for a, b in zip(outcome.losses, expected.losses, strict=True))
    same_weights = largest_difference(outcome.weights, expected.weights) <= EQUAL
    result = "equal" if difference <= EQUAL and same_weights else "**differs**"
    if tried.sixteen_bits and difference <= CLOSE:
        result = "close"
    return [tried.name, f"{result}, {difference:.0e}", seen]


def try_all(chosen: list[Combination], process: Process) -> None:
    """Try combinations together with the other ranks; rank 0 stores a table for each group."""
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # PyTorch's messages about what fails here on purpose
    alone = {}
    for max_norm in (None, MAX_NORM):
        model = model_for()
        losses = train_one_process(model, max_norm=max_norm)
        alone[max_norm is not None] = Outcome(losses, model.state_dict())
    rows: dict[str, list[list[results.Cell]]] = {}
    for tried in chosen:
        rows.setdefault(tried.group, []).append(try_combination(tried, process, alone))
        torch._dynamo.reset()
        gc.collect()  # FSDP2's modules refer to each other in circles
        dist.barrier()
    for group, found in rows.items() if process.rank == 0 else ():
        results.store(
            "combinations_" + group.replace(" ", "_").replace(",", "").replace(".", "_"),
            title=group,
            columns=["combination", "result", "seen"],
            rows=found,
            spread="the largest difference of a loss from one process, over four steps",
        )
