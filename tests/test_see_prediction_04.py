"""see_prediction.py of lesson 04 applies the model of a checkpoint to the box for validation."""

import json
from pathlib import Path

import pytest
import torch

from conftest import Script
from lab.experiments import trivial_loss
from sources import generate
from workshop.datasets import nbody
from workshop.models.unet3d import UNet3D

SCRIPT = "04_mixed_precision/experiments/see_prediction.py"
FLAGS = {"model": "unet3d", "unet_width": 2, "unet_depth": 2, "crop_size": 16, "epochs": 1, "precision": "fp32"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, as far as the script reads it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"config": FLAGS}))
    torch.save({"model": UNet3D(width=2, depth=2).state_dict()}, folder / "checkpoint.pt")
    return folder


def test_it_compares_the_prediction_with_the_identity_baseline(run: Path, run_script: Script, tmp_path: Path) -> None:
    generate("nbody", tmp_path, cells=32)
    result = run_script(SCRIPT, run, "--data_dir", tmp_path, "--out", tmp_path)
    assert result.status == 0, result.stderr
    figures = json.loads((tmp_path / "prediction.json").read_text())
    inputs, targets = nbody.arrays(tmp_path, "val")
    assert figures["cells"] == 32
    baseline, predicted = figures["errors"]["identity baseline"], figures["errors"]["prediction"]
    assert baseline["all"] == pytest.approx(trivial_loss(inputs[None], targets[None]).item())
    parts = [errors["density"] + 3 * errors["velocity"] + errors["temperature"] for errors in (baseline, predicted)]
    assert parts == pytest.approx([5 * baseline["all"], 5 * predicted["all"]])
    assert (tmp_path / "prediction.png").stat().st_size > 10_000


def test_what_is_no_run_of_the_unet_is_refused(run: Path, run_script: Script, tmp_path: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"config": FLAGS | {"model": "cnn"}}))
    result = run_script(SCRIPT, run)
    assert result.status == 2
    assert "is a run of --model cnn" in result.stderr
    result = run_script(SCRIPT, tmp_path / "nothing")
    assert result.status == 2
    assert "name the folder of a run that has finished" in result.stderr
