"""The file for others has all weights, as plain tensors, as they are after an epoch, and one rank has written it."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

import torch
from torch.distributed.tensor import DTensor

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Observed, Script

STEPS = 2
"""of an epoch"""
FLAGS = (
    *("--optimizer", "sgd", "--lr", 0.1, "--batch_size", 8, "--epochs", 2),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    data = {"ranks": 2, "train": 16 * STEPS, "val": 16}
    run = script.run(*FLAGS, **data, keep=True, watch=note_writing, stop_after=STEPS + 1)  # in the second epoch
    file = run.run_dir / "model.pt"
    if not file.exists():
        names = ", ".join(sorted(found.name for found in run.run_dir.glob("*.pt"))) or "no such file"
        yield f"after the first of two epochs, there is no model.pt in the run folder, but {names}"
        return
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # it warns about DTensors in a file
    try:
        found = torch.load(file)
    except Exception as error:
        yield f"torch.load cannot read model.pt: {shorten(str(error), 200, placeholder=' ...')}"
        return
    values = list(found.values()) if isinstance(found, dict) else [found]
    expected = whole_weights(run)
    if other := [type(value).__name__ for value in values if not isinstance(value, torch.Tensor)]:
        yield f"model.pt must have a dictionary of names and tensors, but it has a value of the type {other[0]}"
        return
    held = sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in values)
    needed = sum(weight.numel() for weight in expected.values())
    if held < needed:
        yield f"model.pt has {held:,} numbers, but all weights together have {needed:,}"
    elif sharded := sum(isinstance(value, DTensor) for value in values):
        yield f"{sharded} of {len(values)} weights in model.pt are still DTensors, which belong to a group of ranks"
    elif not isinstance(found, dict) or found.keys() != expected.keys():
        yield "the names in model.pt are not those of the weights of the model"
    elif wrong := [name for name in expected if not equal(found[name], expected[name])]:
        yield f"{len(wrong)} of {len(found)} weights in model.pt are not those at the end of the epoch: {wrong[0]}"
    elif len(writers := [str(number) for number, rank in enumerate(run.ranks) if rank.extra]) > 1:
        yield f"ranks {' and '.join(writers)} write the same file, each over what the other one is writing"


def whole_weights(run: Observed) -> dict[str, torch.Tensor]:
    """Return the weights before the first step of the second epoch."""
    parts = [rank.training[STEPS].weights for rank in run.ranks]
    return {name: torch.cat(of_ranks) for name, *of_ranks in zip(run[0].weights, *parts, strict=True)}


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers."""
    return found.shape == expected.shape and torch.equal(found.float(), expected)


def note_writing(_: Path) -> Callable[[], bool]:
    """Note whether this rank writes a file of the model; see `Script.run`."""
    own_save = torch.save
    written = []

    def save(content: object, file: object, *arguments: object, **keywords: object) -> None:
        written.append(Path(str(getattr(file, "name", file))).name)
        own_save(content, file, *arguments, **keywords)

    torch.save = save
    return lambda: any(name.startswith("model") for name in written)
