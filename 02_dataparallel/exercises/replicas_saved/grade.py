"""A checkpoint that only the script that wrote it can read: it is to hold the model itself, as it was trained."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn

from clinic.runs import Fault, Observed, Script
from workshop.models import build_model
from workshop.paths import REPOSITORY

FLAGS = ("--batch_size", 16)
DATA = {"train": 96, "val": 32}


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    run = script.run(*FLAGS, watch=note_replicas, **DATA)
    if run[0].extra < len(run[0].updates):
        yield f"of {len(run[0].updates)} training steps, {run[0].extra} are taken through nn.DataParallel"
    try:
        saved = torch.load(run.run_dir / "checkpoint.pt", weights_only=False)["model"]
        unknown, missing = ([name for name in a if name not in b] for a, b in ((saved, model()), (model(), saved)))
        differ = [name for name, weight in run[0].weights.items() if not torch.equal(saved.get(name, weight), weight)]
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        yield f"lesson 01 cannot load the model in checkpoint.pt: {shorten(str(error), 200, placeholder=' ...')}"
        return
    if found := [f"{names[0]} {what}" for names, what in ((unknown, "in addition"), (missing, "missing")) if names]:
        names = " and ".join(found)
        yield f"the names of the weights in checkpoint.pt are not those of the model in lesson 01: there is {names}"
    elif differ:
        yield f"in checkpoint.pt, {differ[0]} is not what it was at the end of the training"
    straight = script.run(*FLAGS, "--epochs", 2, **DATA)
    lesson = Script(REPOSITORY / "01_single_gpu" / "train.py", script.folder, script.exercise)
    for name, going_on in ((script.path.name, script), ("train.py of lesson 01", lesson)):
        if wrong := resumed(going_on, run, straight):
            yield f"{name} {wrong}"


def model() -> dict[str, torch.Tensor]:
    """Return the weights of lesson 01's model."""
    return build_model("mnist_cnn", "mnist").state_dict()


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


def resumed(script: Script, run: Observed, straight: Observed) -> str | None:
    """Return what goes wrong when ``script`` adds an epoch to ``run``, against two epochs ``straight``."""
    copy = Path(tempfile.mkdtemp(dir=script.folder)) / "run"
    shutil.copytree(run.run_dir, copy)
    try:
        second = script.run(*FLAGS, "--epochs", 2, "--resume", "true", run_dir=copy, keep=True, **DATA)
    except Fault as fault:
        message = str(fault).split("checkpoint.pt ")[-1].removeprefix("the script ended with: ")
        return f"refuses to continue from this checkpoint: {shorten(message, 600, placeholder=' ...')}"
    if len(second[0].trained) != DATA["train"]:
        return "does not continue from this checkpoint with the second epoch"
    if any(map(differs, second[0].training[0].weights, run[0].weights.values())):
        return "continues with other weights than those in checkpoint.pt: they were not loaded"
    wrong = [part for part, weights in straight[0].weights.items() if differs(weights, second[0].weights[part])]
    if wrong:
        return f"continues, but ends with other weights than a run that was not stopped: {wrong[0]} differs"
    return None


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    return not torch.allclose(a, b, atol=1e-5)
