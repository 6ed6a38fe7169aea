"""Lesson 03 promises: N ranks train as one does; each has its own device; the launcher says who is who."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import torchrun
from workshop.errors import UserError

FLAGS = ["--limit_train", 192, "--limit_val", 61, "--loader", "memory", "--num_workers", 0, "--dropout", "false"]


@pytest.fixture
def script() -> ModuleType:
    """The script as a module."""
    return load_script(REPOSITORY / "03_ddp")


def last_epoch(run_dir: Path) -> dict:
    """Return the results of the last epoch of a run."""
    return json.loads((run_dir / "summary.json").read_text())["epochs"][-1]


def test_two_ranks_train_as_one(run_script: Script, user_environment: dict[str, str], tmp_path: Path) -> None:
    flags = [*FLAGS, "--global_batch_size", 16, "--epochs", 2]
    one = run_script("03_ddp/train.py", *flags, "--run_dir", tmp_path / "one")
    assert one.status == 0, one.stderr
    two = torchrun(
        2, "train.py", *flags, "--run_dir", tmp_path / "two", cwd=REPOSITORY / "03_ddp", environment=user_environment
    )
    assert two.status == 0, two.stderr
    assert two.stdout.count("writing to") == 1, "every rank prints"
    first, second = last_epoch(tmp_path / "one"), last_epoch(tmp_path / "two")
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert second[name] == pytest.approx(first[name], rel=1e-4)
    assert second["val_accuracy"] * 61 == pytest.approx(round(second["val_accuracy"] * 61), abs=1e-3)


def test_the_ranks_come_from_torchrun_or_srun(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.ranks_from_env() == (0, 0, 1)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(UserError, match="srun"):
        script.ranks_from_env()
    for name, value in {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert script.ranks_from_env() == (3, 1, 4)
    for name, value in {"RANK": "5", "LOCAL_RANK": "2", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert script.ranks_from_env() == (5, 2, 8)


def test_more_ranks_than_gpus_are_refused_with_the_way_to_use_cpus(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node 2"):
        script.device_of_rank(0)


def test_each_rank_takes_its_own_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for gpus, local_rank, expected in (
        (4, 3, 3),
        (1, 3, 0),
    ):  # with one GPU in sight, as with --gpus-per-task, it is cuda:0
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert script.device_of_rank(local_rank) == torch.device("cuda", expected)
    assert chosen == [torch.device("cuda", 3), torch.device("cuda", 0)]


def test_the_learning_rate_rises_and_falls(script: ModuleType) -> None:
    config = script.Config(lr_scaling="linear", base_batch_size=64, warmup=0.1)
    steps = {"global_batch_size": 128, "total_steps": 100}
    factors = [script.lr_factor(config, step=step, **steps) for step in range(100)]
    assert factors[9] == max(factors) == 2.0
    assert factors[0] == pytest.approx(0.2) and 0 < factors[-1] < 0.01
    assert factors[:10] == sorted(factors[:10]) and factors[10:] == sorted(factors[10:], reverse=True)
    config = script.Config(lr_scaling="sqrt", warmup=0)
    assert script.lr_factor(config, step=0, global_batch_size=256, total_steps=100) == pytest.approx(2.0)
    factors = [script.lr_factor(script.Config(min_lr=0.1), step=step, **steps) for step in range(100)]
    assert max(factors) == 1.0 and factors[-1] == pytest.approx(0.1, abs=0.001)
    config = script.Config(warmup_steps=4)
    assert [script.lr_factor(config, step=step, **steps) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_gradients_that_are_sent_are_counted(run_script: Script, tmp_path: Path) -> None:
    result = run_script("03_ddp/train.py", *FLAGS, "--run_dir", tmp_path)
    assert "gradients: " in result.stdout and "all-reduce(s) per step, 4.80 MB" in result.stdout


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--static_graph", "true", "--sync_gradients", "false"], "--static_graph"),
        (["--warmup", "1"], "--warmup"),
        (["--timeout_minutes", "0"], "--timeout_minutes"),
        (["--batch_size", "400"], "--batch_size 400"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(run_script: Script, flags: list[str], reason: str) -> None:
    assert reason in run_script("03_ddp/train.py", *FLAGS, *flags).error
