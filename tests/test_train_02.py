"""Lesson 02 without a GPU, or with one: it says that DataParallel does nothing there, and trains like lesson 01."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import Script


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="DataParallel has something to do here")
def test_it_says_that_it_does_nothing_and_trains(run_script: Script, tmp_path: Path) -> None:
    flags = ["--limit_train", 640, "--limit_val", 100, "--loader", "memory"]
    summaries = []
    for lesson in ("01_single_gpu", "02_dataparallel"):
        result = run_script(f"{lesson}/train.py", *flags, "--run_dir", tmp_path)
        assert result.status == 0, result.stderr
        summaries.append(json.loads((tmp_path / "summary.json").read_text()))
    gpus = torch.cuda.device_count()
    assert f"DataParallel does nothing here: it found {gpus} GPU(s); training on one device" in result.stdout
    alone, parallel = summaries
    assert parallel["lesson"] == "02_dataparallel"
    assert parallel["epochs"][0]["val_loss"] == alone["epochs"][0]["val_loss"]


class TwoReplicas(nn.Module):
    """Stands for DataParallel on a machine with two GPUs."""

    device_ids = (0, 1)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)


def test_it_says_how_many_gpus_it_uses(run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "DataParallel", TwoReplicas)
    flags = ("--limit_train", 128, "--limit_val", 64, "--loader", "memory", "--run_dir", tmp_path)
    result = run_script("02_dataparallel/train.py", *flags)
    assert result.status == 0, result.stderr
    assert "DataParallel uses 2 GPUs" in result.stdout
