"""Lesson 01: it learns, its losses do not depend on how the data are loaded, and it can be watched."""

import gzip
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import StepLR

from conftest import REPOSITORY, Script
from lab.launching import load_script
from workshop.ranks import Ranks

SHORT = ["--limit_train", 640, "--limit_val", 100, "--log_interval", 5]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "01_single_gpu/train.py")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(epoch["train_loss"], epoch["val_loss"]) for epoch in summary_of(folder)["epochs"]]


def test_it_learns_and_shows_how(train: Script, tmp_path: Path) -> None:
    result = train("--log_interval", 10, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    (epoch,) = summary_of(tmp_path)["epochs"]
    assert epoch["val_accuracy"] > 0.7
    assert epoch["val_loss"] < epoch["train_loss"]
    assert "samples/s  load" in result.stdout
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [10, 20, 30]
    assert board.Scalars("epoch/val_accuracy")[0].value == pytest.approx(epoch["val_accuracy"])
    assert {"train/samples_per_second", "train/load_seconds", "train/compute_seconds"} <= set(board.Tags()["scalars"])


def test_the_parts_of_the_start_add_up(train: Script, tmp_path: Path) -> None:
    result = train(*SHORT, "--start_times", "true", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    whole = re.search(r"([\d.]+) s from the start of the process to the end of the first step:\n", result.stdout)
    parts = dict(map(reversed, re.findall(r"^ +([\d.]+) s  (.+)$", result.stdout, re.MULTILINE)))
    assert {"Python, imports, flags", "first step"} <= parts.keys()
    assert sum(map(float, parts.values())) == pytest.approx(float(whole[1]), abs=0.1)
    assert "first step" not in train(*SHORT, "--run_dir", tmp_path).stdout


@pytest.mark.slow
def test_one_seed_gives_the_same_losses_whatever_the_workers(train: Script, tmp_path: Path) -> None:
    for name, flags in {"a": ["--num_workers", 0], "b": ["--num_workers", 2], "c": ["--seed", 2]}.items():
        assert train(*SHORT, *flags, "--run_dir", tmp_path / name).status == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.slow
def test_two_epochs_in_parts_are_two_epochs_in_one_go(train: Script, tmp_path: Path) -> None:
    """What the page lets the reader verify; test_survive.py stops runs in other places."""
    for folder, flags in (("whole", ["--epochs", 2]), ("parts", []), ("parts", ["--epochs", 2, "--resume", "true"])):
        assert train(*SHORT, *flags, "--run_dir", tmp_path / folder).status == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    checkpoint = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert checkpoint["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-3 * 0.7**2)


def test_another_learning_rate_on_resuming_is_refused(train: Script, tmp_path: Path) -> None:
    assert train(*SHORT, "--run_dir", tmp_path).status == 0
    again = ["--run_dir", tmp_path, "--epochs", 2, "--resume", "true"]
    assert "--lr" in train(*SHORT, *again, "--lr", 0.01).error


def test_without_its_state_a_step_schedule_goes_on_and_others_begin_again() -> None:
    """As the page says of a checkpoint that lacks the state of the schedule."""
    parameter = torch.nn.Parameter(torch.zeros(1))

    def optimizer_and(schedule: str) -> tuple:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        if schedule == "StepLR":
            return optimizer, StepLR(optimizer, step_size=1, gamma=0.5)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    rates = {}
    for schedule in ("StepLR", "LambdaLR"):
        before, scheduler = optimizer_and(schedule)
        for _ in range(3):
            before.step()
            scheduler.step()
        after, forgetful = optimizer_and(schedule)
        after.load_state_dict(before.state_dict())
        after.step()
        forgetful.step()
        rates[schedule] = after.param_groups[0]["lr"]
    assert rates == {"StepLR": 0.5**4, "LambdaLR": 0.5}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_flags_are_arguments_of_the_dataloader(workers: int, data_dir: Path) -> None:
    script = load_script(REPOSITORY / "01_single_gpu")
    flags = {"num_workers": workers, "prefetch_factor": 3, "persistent_workers": True, "batch_size": 32}
    loader = script.make_loader(script.Config(data_dir=data_dir, **flags), "train", Ranks(device=torch.device("cpu")))
    assert (loader.num_workers, loader.persistent_workers) == (workers, workers > 0)
    assert loader.prefetch_factor == (3 if workers else None)
    assert not loader.pin_memory, "there is no GPU to copy to"
    inputs, targets = next(iter(loader))
    assert inputs.shape == (32, 1, 28, 28) and targets.shape == (32,)


@pytest.mark.slow
def test_trace_and_monitor(train: Script, tmp_path: Path) -> None:
    result = train(*SHORT, "--limit_train", 1920, "--trace", "true", "--monitor", "true", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert "CPU time by operator" in result.stdout
    with gzip.open(tmp_path / "rank0.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = {name: sum(event.get("name") == name for event in events) for name in ("data", "forward", "backward")}
    assert all(count >= 6 for count in steps.values()), steps
    assert (tmp_path / "trace.png").exists()
    quantities = summary_of(tmp_path)["monitor"]["quantities"]
    assert quantities["rss_bytes"]["max"] > 1e8
    assert "monitor/cpu_percent" in EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]


@pytest.mark.slow
def test_cifar10(train: Script, tmp_path: Path) -> None:
    flags = ["--config", "../configs/cifar10.yaml", "--loader", "memory", "--epochs", 8, "--run_dir", tmp_path]
    assert train(*flags).status == 0
    epochs = summary_of(tmp_path)["epochs"]
    assert epochs[-1]["val_accuracy"] > max(0.15, epochs[0]["val_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["adadelta", *[pytest.param(name, marks=pytest.mark.thorough) for name in ("sgd", "adamw")]]
)
def test_every_optimizer_learns(train: Script, tmp_path: Path, optimizer: str) -> None:
    lr = {"sgd": 0.01, "adamw": 1e-3, "adadelta": 1.0}[optimizer]
    assert train("--optimizer", optimizer, "--lr", lr, "--run_dir", tmp_path).status == 0
    assert summary_of(tmp_path)["epochs"][0]["val_accuracy"] > 0.4


def test_missing_data_are_one_line_that_says_how_to_get_them(train: Script, tmp_path: Path) -> None:
    assert "python ../data/prepare.py mnist --synthetic" in train("--data_dir", tmp_path / "nowhere").error


@pytest.mark.slow
def test_too_many_workers_give_a_warning(train: Script, tmp_path: Path) -> None:
    result = train(*SHORT, "--num_workers", 2, "--run_dir", tmp_path, SLURM_CPUS_PER_TASK="1")
    assert result.status == 0
    assert "warning: --num_workers 2 is more than the 1 CPUs of this process\n" in result.stderr
