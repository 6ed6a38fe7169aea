"""What the experiments on two ranks share: models that the lessons' own scripts build, and counted collectives."""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from lab.collectives import mean_over_ranks as mean_over_ranks
from lab.flags import make_output_folder
from lab.launching import load_script
from lab.process_group import process_group
from lab.results import write_results
from workshop.commandline import load_config
from workshop.distributed import AllReduceCounter
from workshop.errors import UserError, first_on_node
from workshop.models.vit import build_vit
from workshop.paths import REPOSITORY

LESSON_04 = load_script(REPOSITORY / "04_mixed_precision")
LESSON_05 = load_script(REPOSITORY / "05_fully_sharded")
KINDS = {"allgather": "all-gathers", "reducescatter": "reduce-scatters", "allreduce": "all-reduces"}
"""what torch calls the collectives, without its underscores, and what the tables call them"""
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def read_arguments(parse: Callable[[], argparse.Namespace]) -> argparse.Namespace:
    """Return the command line as ``parse`` reads it, if train.py can build its model and its folder can be written.

    Raises:
        UserError: it cannot; only the first rank of this node reports that.
    """
    try:
        arguments = parse()
        with torch.device("meta"):
            build_vit("mnist", 64, getattr(arguments, "vit_patch", 7), arguments.vit_width, depth=1)
        if first_on_node():
            make_output_folder(arguments.out)
    except UserError as error:
        error.already_reported = not first_on_node()  # all ranks have the same command line
        raise
    return arguments


def measure_on_ranks(
    parse: Callable[[], argparse.Namespace],
    measure: Callable[[argparse.Namespace, int, int, torch.device], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
    file: str,
) -> None:
    """Measure on all ranks; rank 0 prints and saves what was found.

    Args:
        parse: reads the command line.
        measure: is called on each rank with the command line, rank, world size and device; returns the figures.
        report: prints the figures.
        file: name of the results file in the folder ``--out``.

    Raises:
        UserError: as `read_arguments`, or not all ranks join.
    """
    arguments = read_arguments(parse)
    torch.set_num_threads(1)
    with process_group() as (rank, world_size, device):
        figures = measure(arguments, rank, world_size, device)
        if rank == 0:
            report(figures)
            config = {name: value for name, value in vars(arguments).items() if name != "out"}
            write_results(arguments.out / file, device, {"config": config} | figures)


def flags_of(width: int, depth: int, *more: object) -> list[str]:
    """Return the flags of train.py for a vision transformer that AdamW trains."""
    flags = ["--model", "vit", "--optimizer", "adamw", "--vit_width", width, "--vit_depth", depth, *more]
    return [str(flag) for flag in flags]


def sharded(
    flags: list[str], rank: int, device: torch.device, world_size: int
) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """Return lesson 05's model, its optimizer and its training step."""
    config = load_config(LESSON_05.Config, flags)
    torch.manual_seed(0)  # for the weights that rank 0 draws
    model = LESSON_05.shard_model(config, rank, device, world_size)
    optimizer = LESSON_05.make_optimizer(config, model)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    return model, optimizer, partial(LESSON_05.train_step, config, model, optimizer, scaler)


def replicated(
    flags: list[str], device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, Step, AllReduceCounter]:
    """Return lesson 04's model, its optimizer, its training step, and what counts the all-reduces of the latter."""
    config = load_config(LESSON_04.Config, flags)
    torch.manual_seed(0)
    model = LESSON_04.make_model(config).to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = LESSON_04.make_optimizer(config, model)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    step = partial(LESSON_04.train_step, config, ddp_model, optimizer, scaler)
    return model, optimizer, step, AllReduceCounter(ddp_model)


def own_batches(
    rank: int, batch_size: int, device: torch.device, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of random images (N, 1, 28, 28) and labels (N,), which differ from those of the other ranks."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(count, batch_size, 1, 28, 28, generator=generator).to(device)
    labels = torch.randint(10, (count, batch_size), generator=generator).to(device)
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
