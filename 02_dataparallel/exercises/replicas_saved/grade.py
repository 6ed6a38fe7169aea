"""A checkpoint that only the script that wrote it can read: it is to hold the model itself, as it was trained."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.observe import Fault, Observed, Script
from workshop.models import build_model
from workshop.paths import REPOSITORY

FLAGS = ("--batch_size", 16)
DATA = {"train": 96, "val": 32}


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    run = script.run(*FLAGS, keep=True, **DATA)
    try:
        model = build_model("mnist_cnn", "mnist")
        model.load_state_dict(torch.load(run.run_dir / "checkpoint.pt", weights_only=False)["model"])
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()
        yield f"lesson 01's model does not take what is in checkpoint.pt: {' '.join(map(str.strip, reason))[:200]}"
    else:
        validation = [call for call in run[0].shown if not call.training]
        with torch.inference_mode():
            model.eval()
            differ = [(model(call.inputs) - call.outputs).abs().max().item() for call in validation]
        if not differ or max(differ) > 1e-4:
            yield "the model in checkpoint.pt does not answer as the one that was trained"
    straight = script.run(*FLAGS, "--epochs", 2, **DATA)
    yield from resumed(script, run, straight, "it")
    yield from resumed(Script(REPOSITORY / "01_single_gpu" / "train.py", script.folder), run, straight, "lesson 01")


def resumed(going_on: Script, run: Observed, straight: Observed, name: str) -> Iterator[str]:
    """Yield what goes wrong when ``going_on`` adds an epoch to ``run``, against two epochs ``straight``."""
    copy = Path(tempfile.mkdtemp(dir=going_on.folder)) / "run"
    shutil.copytree(run.run_dir, copy)
    try:
        second = going_on.run(*FLAGS, "--epochs", 2, "--resume", "true", run_dir=copy, **DATA)
    except Fault as fault:
        message = str(fault).split("checkpoint.pt ")[-1].removeprefix("the script ended with: ")
        yield f"{name} refuses to go on from this checkpoint: {message[:200]}"
        return
    if len(second[0].trained) != DATA["train"]:
        yield f"{name} does not go on from this checkpoint with the second epoch"
        return
    differ = [
        part
        for part, weights in straight[0].weights.items()
        if not torch.allclose(weights, second[0].weights[part], atol=1e-5)
    ]
    if differ:
        yield f"{name} goes on from this checkpoint with other weights than a run that never ended: {differ[0]} differs"
