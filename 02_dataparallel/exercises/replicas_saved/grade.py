"""A checkpoint that only the script that wrote it can read: it is to hold the model itself, as it was trained."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn

from clinic.observe import Fault, Observed, Script
from workshop.models import build_model
from workshop.paths import REPOSITORY

FLAGS = ("--batch_size", 16)
DATA = {"train": 96, "val": 32}


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    run = script.run(*FLAGS, keep=True, watch=note_replicas, **DATA)
    if run[0].extra < len(run[0].updates):
        yield f"of {len(run[0].updates)} training steps, {run[0].extra} are taken through nn.DataParallel"
    model = build_model("mnist_cnn", "mnist")
    try:
        weights = torch.load(run.run_dir / "checkpoint.pt", weights_only=False)["model"]
        unknown, missing = differences(weights, model.state_dict())
        if unknown or missing:
            yield (
                "the names of the weights in checkpoint.pt are not those of the model in lesson 01: there is "
                + " and ".join(
                    [f"{names[0]} {what}" for names, what in ((unknown, "in addition"), (missing, "missing")) if names]
                )
            )
        else:
            model.load_state_dict(weights)
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        yield f"lesson 01 cannot load the model in checkpoint.pt: {shorten(str(error), 200, placeholder=' ...')}"
        unknown = missing = ["all"]
    if not unknown and not missing:
        validation = [call for call in run[0].shown if not call.training]
        with torch.inference_mode():
            model.eval()
            differ = [(model(call.inputs) - call.outputs).abs().max().item() for call in validation]
        if not differ or max(differ) > 1e-4:
            yield "the model in checkpoint.pt does not answer as the one that was trained"
    straight = script.run(*FLAGS, "--epochs", 2, **DATA)
    yield from resumed(script, run, straight, "it")
    yield from resumed(Script(REPOSITORY / "01_single_gpu" / "train.py", script.folder), run, straight, "lesson 01")


def differences(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Return the names that only ``these`` have, and those that only ``those`` have."""
    return [name for name in these if name not in those], [name for name in those if name not in these]


def note_replicas(_: Path) -> Callable[[], int]:
    """Count the training steps whose forward pass is that of nn.DataParallel; see `Script.run`."""
    count = 0
    own_forward = nn.DataParallel.forward

    def forward(replicas: nn.DataParallel, *arguments: object, **keywords: object) -> object:
        nonlocal count
        count += replicas.training
        return own_forward(replicas, *arguments, **keywords)

    nn.DataParallel.forward = forward
    return lambda: count


def resumed(going_on: Script, run: Observed, straight: Observed, name: str) -> Iterator[str]:
    """Yield what goes wrong when ``going_on`` adds an epoch to ``run``, against two epochs ``straight``."""
    copy = Path(tempfile.mkdtemp(dir=going_on.folder)) / "run"
    shutil.copytree(run.run_dir, copy)
    try:
        second = going_on.run(*FLAGS, "--epochs", 2, "--resume", "true", run_dir=copy, **DATA)
    except Fault as fault:
        message = str(fault).split("checkpoint.pt ")[-1].removeprefix("the script ended with: ")
        yield f"{name} refuses to continue from this checkpoint: {shorten(message, 200, placeholder=' ...')}"
        return
    if len(second[0].trained) != DATA["train"]:
        yield f"{name} does not continue from this checkpoint with the second epoch"
        return
    differ = [
        part
        for part, weights in straight[0].weights.items()
        if not torch.allclose(weights, second[0].weights[part], atol=1e-5)
    ]
    if differ:
        yield f"continued by {name}, the run ends with other weights than one that was not stopped: {differ[0]} differs"
