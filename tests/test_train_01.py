"""Lesson 01 run as by a user: it learns, logs, repeats, resumes, is profiled; mistakes are reported in one line."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import REPOSITORY, Script

LESSON = REPOSITORY / "01_single_gpu"
RANGES = ("data", "forward", "backward", "optimizer")
SHORT = ["--limit_train", "640", "--limit_val", "100", "--log_interval", "5"]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "01_single_gpu/train.py")


@pytest.fixture
def train_in_new_process(user_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, cwd=LESSON, env=user_environment | environment, capture_output=True, text=True)

    return run


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(epoch["train_loss"], epoch["val_loss"]) for epoch in summary_of(folder)["epochs"]]


def test_learns_and_logs(train: Script, tmp_path: Path) -> None:
    result = train("--log_interval", 10)
    assert result.status == 0, result.stderr
    folder = tmp_path / "runs" / "01_single_gpu" / "mnist"
    summary = summary_of(folder)
    (epoch,) = summary["epochs"]
    assert epoch["val_accuracy"] > 0.7
    assert epoch["val_loss"] < epoch["train_loss"]
    assert (summary["lesson"], summary["world_size"], summary["global_batch_size"]) == ("01_single_gpu", 1, 64)
    assert summary["config"]["log_interval"] == 10
    assert summary["command"] == "python train.py --log_interval 10"
    assert summary["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert summary["peak_memory_bytes"] > 1e8
    assert (folder / "checkpoint.pt").exists()
    assert "samples/s  load" in result.stdout

    board = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [10, 20, 30]
    assert board.Scalars("epoch/val_accuracy")[0].value == pytest.approx(epoch["val_accuracy"])
    assert {"train/samples_per_second", "train/load_seconds", "train/compute_seconds"} <= set(board.Tags()["scalars"])


def test_one_seed_gives_the_same_losses_whatever_the_workers(train: Script, tmp_path: Path) -> None:
    for name, flags in {"a": ["--num_workers", 0], "b": ["--num_workers", 2], "c": ["--seed", 2]}.items():
        assert train(*SHORT, *flags, "--run_dir", tmp_path / name).status == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_resume_goes_on_with_the_next_epoch(train: Script, tmp_path: Path) -> None:
    assert train(*SHORT, "--run_dir", tmp_path / "run").status == 0
    result = train(*SHORT, "--run_dir", tmp_path / "run", "--epochs", 2, "--resume", "true")
    assert result.status == 0, result.stderr
    assert "after epoch 1" in result.stdout
    epochs = summary_of(tmp_path / "run")["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[1]["val_loss"] < epochs[0]["val_loss"]
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["scheduler"]["_last_lr"] == [pytest.approx(1e-3 * 0.7**2)]


def test_resume_leaves_a_finished_run_as_it_is(train: Script, tmp_path: Path) -> None:
    assert train(*SHORT, "--run_dir", tmp_path).status == 0
    summary = summary_of(tmp_path)
    result = train(*SHORT, "--run_dir", tmp_path, "--resume", "true", "--trace", "true", "--monitor", "true")
    assert result.status == 0, result.stderr
    assert "after epoch 1" in result.stdout
    assert summary_of(tmp_path) == summary


def test_a_new_run_replaces_the_files_of_the_old_one(train: Script, tmp_path: Path) -> None:
    for _ in range(2):
        assert train(*SHORT, "--run_dir", tmp_path / "run").status == 0
    assert len(list((tmp_path / "run").glob("events.*"))) == 1


def test_trace_and_monitor(train: Script, tmp_path: Path) -> None:
    result = train(*SHORT, "--limit_train", 1920, "--trace", "true", "--monitor", "true", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert "CPU time by operator" in result.stdout
    with gzip.open(tmp_path / "rank0.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = {name: sum(event.get("name") == name for event in events) for name in RANGES}
    assert all(count >= 6 for count in steps.values()), steps
    quantities = summary_of(tmp_path)["monitor"]["quantities"]
    assert quantities["rss_bytes"]["max"] > 1e8
    assert quantities["cpu_percent"]["max"] > 0
    assert "monitor/cpu_percent" in EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]


def test_cifar10(train: Script, tmp_path: Path) -> None:
    flags = ["--config", "../configs/cifar10.yaml", "--loader", "memory", "--epochs", 8, "--run_dir", tmp_path]
    assert train(*flags).status == 0
    epochs = summary_of(tmp_path)["epochs"]
    assert epochs[-1]["val_accuracy"] > max(0.15, epochs[0]["val_accuracy"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adadelta"])
def test_every_optimizer_learns(train: Script, tmp_path: Path, optimizer: str) -> None:
    lr = {"sgd": 0.01, "adamw": 1e-3, "adadelta": 1.0}[optimizer]
    assert train("--optimizer", optimizer, "--lr", lr, "--run_dir", tmp_path / "run").status == 0
    assert summary_of(tmp_path / "run")["epochs"][0]["val_accuracy"] > 0.4


def shown_profile(train_in_new_process: Callable, file: Path) -> str:
    return train_in_new_process("-m", "line_profiler", "-mt", file).stdout


def test_kernprof_profiles_the_training_function(train_in_new_process: Callable, tmp_path: Path) -> None:
    file = tmp_path / "train.lprof"
    assert train_in_new_process("-m", "kernprof", "-l", "-o", file, "train.py", *SHORT).returncode == 0
    assert_profile_of_training(shown_profile(train_in_new_process, file))


def test_line_profile_by_environment_variable(train_in_new_process: Callable) -> None:
    try:
        assert train_in_new_process("train.py", *SHORT, LINE_PROFILE="1").returncode == 0
        assert_profile_of_training(shown_profile(train_in_new_process, LESSON / "profile_output.lprof"))
    finally:
        for file in LESSON.glob("profile_output*"):
            file.unlink()


def assert_profile_of_training(shown: str) -> None:
    assert "Function: train_one_epoch" in shown
    (backward,) = [line for line in shown.splitlines() if "loss.backward()" in line]
    hits = backward.split()[1]
    assert hits == "10"


def test_without_kernprof_the_decorator_returns_the_function() -> None:
    code = "from workshop.profiling import profile\ndef f(): pass\nassert profile(f) is f"
    environment = {name: value for name, value in os.environ.items() if name != "LINE_PROFILE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data_dir", "nowhere"], "python ../data/prepare.py mnist --synthetic"),
        (["--batch_sise", "3"], "unknown flag --batch_sise; did you mean --batch_size?"),
        (["--batch_size", "many"], "--batch_size takes int, got 'many'"),
        (["--batch_size", "2001"], "there are only 2000 to train on"),
        (["--num_workers", "-1"], "--num_workers must be 0"),
        (["--model", "mnist_cmn"], "did you mean mnist_cnn?"),
        (["--fused", "true"], "unknown flag --fused; "),
        (["--precision", "bf16"], "unknown flag --precision; "),
        (["--loader", "tape"], "--loader takes one of 'map', 'shards', 'memory', 'device', 'dali', got 'tape'"),
        (["--trace", "true", "--run_dir", "/proc/nowhere"], "cannot write into /proc/nowhere"),
        (["--run_dir", "/proc/nowhere"], "cannot write into /proc/nowhere"),
        (["--run_dir", "train.py"], "cannot write into train.py"),
        (["--config", "nowhere.yaml"], "cannot read the config file nowhere.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, tmp_path: Path, flags: list[str], message: str) -> None:
    result = train(*flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("*.*"))


def test_a_damaged_checkpoint_is_one_line(train: Script, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"half a checkp")
    result = train("--run_dir", tmp_path, "--resume", "true")
    assert result.status == 2
    assert f"cannot go on: {tmp_path}/checkpoint.pt is damaged" in result.stderr
    assert "Traceback" not in result.stderr


def test_too_many_workers_give_a_warning(train: Script) -> None:
    result = train(*SHORT, "--num_workers", 2, SLURM_CPUS_PER_TASK="1")
    assert result.status == 0
    assert result.stderr == "warning: --num_workers 2 is more than the 1 CPUs this process may use\n"
