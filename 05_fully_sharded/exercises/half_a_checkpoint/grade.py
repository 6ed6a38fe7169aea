"""The file for others has all weights, as plain tensors, as they are after the last epoch."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from clinic.observe import Script, slowness
from clinic.sharded import local
from workshop.models.vit import build_vit

WIDTH, DEPTH = 32, 2
FLAGS = (
    "--optimizer",
    "sgd",
    "--lr",
    0.1,
    "--batch_size",
    8,
    "--vit_width",
    WIDTH,
    "--vit_depth",
    DEPTH,
    "--epochs",
    2,
)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run(*FLAGS, ranks=2, train=32, val=16, notes=False, watch=note_validation, timeout=20 * slowness())
    file = run.run_dir / "model.pt"
    if not file.exists():
        yield f"there is no model.pt in the run folder, but {names(run.run_dir.glob('*.pt'))}"
        return
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # it warns about DTensors in a file
    try:
        weights = torch.load(file)
    except Exception as error:
        yield f"torch.load cannot read model.pt: {shorten(str(error), 200, placeholder=' ...')}"
        return
    values = weights.values() if isinstance(weights, dict) else [weights]
    if other := [type(value).__name__ for value in values if not isinstance(value, torch.Tensor)]:
        yield f"model.pt must have a dictionary of names and tensors, but it has a value of the type {other[0]}"
        return
    sharded = sum(isinstance(weight, DTensor) for weight in weights.values())
    held = sum(local(weight).numel() for weight in weights.values())
    model = build_vit("mnist", crop_size=64, patch=7, width=WIDTH, depth=DEPTH)
    needed = sum(weight.numel() for weight in model.parameters())
    if held < needed:
        yield f"model.pt has {held:,} numbers, but all weights together have {needed:,}"
        return
    if sharded:
        yield f"{sharded} of {len(weights)} weights in model.pt are still DTensors, which belong to a group of ranks"
        return
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        yield f"the model in one process cannot load model.pt: {shorten(str(error), 200, placeholder=' ...')}"
        return
    inputs, outputs, was_there = run[0].extra
    if not was_there:
        yield "after the first of two epochs, there is no model.pt yet"
        return
    with torch.inference_mode():
        off = (model.eval()(inputs) - outputs).abs().max().item()
    if not off < 1e-4:
        yield f"the scores of the model in model.pt differ by up to {off:.2g} from those in the last validation"


def note_validation(_: Path) -> Callable[[], tuple[torch.Tensor, torch.Tensor, bool]]:
    """Note what the model is given, and what it returns, in the last call of a validation.

    And whether model.pt is there in the steps of the second epoch.
    """
    last: list[torch.Tensor] = []
    there: list[bool] = []
    file = Path(sys.argv[sys.argv.index("--run_dir") + 1], "model.pt")

    def after_forward(module: nn.Module, arguments: tuple, outputs: torch.Tensor) -> None:
        if module.training and last and hasattr(module, "blocks"):
            there.append(file.exists())
        if not module.training and hasattr(module, "blocks") and arguments[0].dim() == 4:
            last[:] = arguments[0].clone(), outputs.clone()

    register_module_forward_hook(after_forward)
    return lambda: (last[0], last[1], all(there))


def names(files: Iterator[Path]) -> str:
    """Return the names of files."""
    return ", ".join(sorted(file.name for file in files))
