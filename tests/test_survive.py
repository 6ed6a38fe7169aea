"""Runs that survive: they go on bit for bit where they were, from the last good checkpoint, whatever ended them."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Result, Script

from workshop.resumable import Resumable

SHORT = ["--limit_train", 320, "--limit_val", 64, "--batch_size", 32, "--epochs", 2]  # 10 steps an epoch
MEMORY = [*SHORT, "--loader", "memory"]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "01_single_gpu/train.py")


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Has something done in a step, counted over all epochs, of the runs that follow."""

    def plan(step: int, action: Callable[[], object]) -> None:
        count_step = Resumable.count_step

        def counted(run: Resumable, loss: torch.Tensor) -> None:
            count_step(run, loss)
            if run.steps + run.step == step:
                action()

        monkeypatch.setattr(Resumable, "count_step", counted)

    return plan


def tell(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def state_of(folder: Path, name: str = "checkpoint.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def results_of(folder: Path) -> list[tuple[float, float]]:
    return [(e["train_loss"], e["val_loss"]) for e in json.loads((folder / "summary.json").read_text())["epochs"]]


def assert_equal(one: object, other: object) -> None:
    """Bit for bit, through all nested parts of two states; only times may differ."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"seconds", "samples_per_second"}:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


def one_line(result: Result) -> str:
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    "rung",
    [
        ["--loader", "map", "--num_workers", 0],
        ["--loader", "map", "--num_workers", 1],
        ["--loader", "memory"],
        ["--loader", "device"],
        ["--loader", "shards", "--num_workers", 0],
        ["--loader", "shards", "--num_workers", 1],
        ["--loader", "dali"],
    ],
    ids=lambda rung: "-".join(map(str, rung[1::2])),
)
def test_goes_on_bit_for_bit_in_the_middle_of_an_epoch(
    train: Script, at_step: Callable, tmp_path: Path, rung: list
) -> None:
    assert train(*SHORT, *rung, "--run_dir", tmp_path / "whole").status == 0
    at_step(14, tell(signal.SIGTERM))
    stopped = train(*SHORT, *rung, "--run_dir", tmp_path / "parts")
    assert stopped.status == 0
    assert "told to stop by SIGTERM: saved after step 4 of epoch 2" in stopped.stdout
    resumed = train(*SHORT, *rung, "--run_dir", tmp_path / "parts", "--resume", "true", "--log_interval", 5)
    assert resumed.status == 0, resumed.stderr
    assert "checkpoint.pt after step 4 of epoch 2\n" in resumed.stdout
    assert re.search(r"epoch 2  step  5/10 .*\n.*epoch 2  step 10/10", resumed.stdout)
    assert_equal(state_of(tmp_path / "parts"), state_of(tmp_path / "whole"))
    assert results_of(tmp_path / "parts") == results_of(tmp_path / "whole")
