"""Runs that survive: they continue bit for bit where they were, from the last good checkpoint, whatever ended them."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, Result, Script
from sources import generate, pack
from workshop.errors import UserError
from workshop.run.checkpoint import check_compatible
from workshop.run.position import Position
from workshop.signals import StopSignals, ignore_stop_signals

pytestmark = pytest.mark.slow

SHORT = ["--limit_train", 80, "--limit_val", 16, "--batch_size", 8, "--epochs", 2]  # 10 steps an epoch
MEMORY = [*SHORT, "--loader", "memory"]


@pytest.fixture(scope="module")
def packed_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set with its shards."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(data_dir / "MNIST", folder / "MNIST")
    pack("mnist", folder)
    return folder


@pytest.fixture
def train(run_script: Script, packed_data: Path) -> Iterator[Script]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these batches are too small for more
    yield partial(run_script, "01_single_gpu/train.py", WORKSHOP_DATA=str(packed_data))
    torch.set_num_threads(threads)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Has something done in a step, counted over all epochs, of the runs that follow."""

    def plan(step: int, action: Callable[[], object]) -> None:
        count_step = Position.count_step

        def count_step_then_act(position: Position, loss: torch.Tensor) -> None:
            count_step(position, loss)
            if position.finished_steps + position.step == step:
                action()

        monkeypatch.setattr(Position, "count_step", count_step_then_act)

    return plan


def send(number: int) -> Callable[[], object]:
    """Sends a signal to all processes of the run, with its loader workers, as Slurm does; returns once it arrived."""

    def kill() -> None:
        workers = [process.pid for process in multiprocessing.active_children()]
        stop = signal.getsignal(number).__self__
        subprocess.run(["kill", f"-{int(number)}", *map(str, workers), str(os.getpid())], check=True)
        while not stop.received:
            time.sleep(0.001)

    return kill


def state_of(folder: Path, name: str = "checkpoint.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def results_of(folder: Path) -> list[tuple[float, float]]:
    return [(e["train_loss"], e["val_loss"]) for e in json.loads((folder / "summary.json").read_text())["epochs"]]


def assert_equal(one: object, other: object) -> None:
    """Check that two states are equal bit for bit in all nested parts; only times may differ."""
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
    "loader",
    [
        ["--loader", "map", "--num_workers", 0],
        ["--loader", "map", "--num_workers", 1],
        ["--loader", "memory"],
        ["--loader", "device"],
        ["--loader", "shards", "--num_workers", 0],
        ["--loader", "shards", "--num_workers", 1],
        ["--loader", "dali"],
    ],
    ids=lambda loader: "-".join(map(str, loader[1::2])),
)
def test_a_run_continues_bit_for_bit_within_an_epoch(
    train: Script, at_step: Callable, tmp_path: Path, loader: list
) -> None:
    assert train(*SHORT, *loader, "--run_dir", tmp_path / "whole").status == 0
    at_step(14, send(signal.SIGTERM))
    stopped = train(*SHORT, *loader, "--run_dir", tmp_path / "parts")
    assert stopped.status == 0
    assert "stopped by SIGTERM: saved after step 4 of epoch 2" in stopped.stdout
    resumed = train(*SHORT, *loader, "--run_dir", tmp_path / "parts", "--resume", "true", "--log_interval", 5)
    assert resumed.status == 0, resumed.stderr
    assert "checkpoint.pt after step 4 of epoch 2\n" in resumed.stdout
    assert re.search(r"epoch 2  step  5/10 .*\n.*epoch 2  step 10/10", resumed.stdout)
    assert_equal(state_of(tmp_path / "parts"), state_of(tmp_path / "whole"))
    assert results_of(tmp_path / "parts") == results_of(tmp_path / "whole")


def die(*_: object) -> None:
    raise RuntimeError("died of a signal")


@pytest.fixture
def dies_of_signals() -> Iterator[None]:
    """Have SIGINT and SIGHUP, which whoever runs the tests may ignore, be fatal."""
    before = {number: signal.signal(number, die) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_stop_a_run_as_slurm_does(
    train: Script, at_step: Callable, tmp_path: Path, dies_of_signals: None, number: signal.Signals
) -> None:
    flags = [*SHORT, "--loader", "map", "--num_workers", 1, "--run_dir", tmp_path]
    at_step(14, send(number))
    stopped = train(*flags)
    assert stopped.status == 0, stopped.stderr
    assert f"stopped by {number.name}: saved after step 4 of epoch 2; --resume true" in stopped.stdout
    assert stopped.stderr == ""
    resumed = train(*flags, "--resume", "true")
    assert "checkpoint.pt after step 4 of epoch 2\n" in resumed.stdout


@pytest.mark.parametrize("ending", [False, True], ids=["running", "ending"])
def test_a_second_ctrl_c_ends_a_run_at_once(dies_of_signals: None, ending: bool) -> None:
    run = os.fork()
    if run == 0:
        try:
            stop = StopSignals()
            stop.__enter__()
            os.kill(os.getpid(), signal.SIGINT)
            if ending:
                stop.__exit__()
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os._exit(stop.received)
    assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == -signal.SIGINT


def test_what_nohup_ignores_stops_no_run(dies_of_signals: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM


@pytest.mark.parametrize("lacking", [[], ["sigwaitinfo"]], ids=["linux", "macos"])
def test_a_loader_worker_outlives_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, dies_of_signals: None, lacking: list[str]
) -> None:
    for name in lacking:
        monkeypatch.delattr(signal, name, raising=False)
    worker = os.fork()
    if worker == 0:
        status = 1
        try:
            ignore_stop_signals()
            os.kill(os.getpid(), signal.SIGINT)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


def test_a_checkpoint_holds_all_that_the_run_is_made_of(train: Script, tmp_path: Path) -> None:
    assert train(*MEMORY, "--save_interval", 4, "--run_dir", tmp_path).status == 0
    state = state_of(tmp_path)
    assert state.keys() == {"model", "optimizer", "scheduler", "run"}
    assert (len(state["run"]["epochs"]), state["run"]["step"]) == (2, 0)
    assert state["run"]["ranks"][0]["random"].keys() == {"torch", "python", "numpy"}
    before = state_of(tmp_path, "checkpoint.previous.pt")
    assert (len(before["run"]["epochs"]), before["run"]["step"]) == (1, 8)
    assert not list(tmp_path.glob("*.tmp"))


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(train: Script, tmp_path: Path, damage: Callable) -> None:
    assert train(*MEMORY, "--save_interval", 4, "--run_dir", tmp_path).status == 0
    whole = state_of(tmp_path)
    damage(tmp_path / "checkpoint.pt")
    resumed = train(*MEMORY, "--resume", "true", "--run_dir", tmp_path)
    assert resumed.status == 0, resumed.stderr
    (line,) = [line for line in resumed.stdout.splitlines() if line.startswith("resumed")]
    assert f"resumed from {tmp_path}/checkpoint.previous.pt, as {tmp_path}/checkpoint.pt is damaged" in line
    assert line.endswith("after step 8 of epoch 2")
    assert_equal(state_of(tmp_path), whole)

    damage(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.previous.pt").write_bytes(b"half a checkp")
    line = one_line(train(*MEMORY, "--resume", "true", "--run_dir", tmp_path))
    assert f"{tmp_path}/checkpoint.pt is damaged" in line and "no earlier one is good" in line


def test_a_damaged_checkpoint_that_cannot_be_set_aside_is_one_line(train: Script, tmp_path: Path) -> None:
    assert train(*MEMORY, "--save_interval", 4, "--run_dir", tmp_path).status == 0
    cut_short(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.damaged" / "full").mkdir(parents=True)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.pt")}
    line = one_line(train(*MEMORY, "--resume", "true", "--run_dir", tmp_path))
    assert f"Is a directory: '{tmp_path}/checkpoint.pt' -> '{tmp_path}/checkpoint.damaged'" in line
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.pt")} == before


def test_a_checkpoint_of_another_run_is_refused(
    train: Script, at_step: Callable, data_dir: Path, tmp_path: Path
) -> None:
    at_step(14, send(signal.SIGUSR1))
    assert train(*MEMORY, "--run_dir", tmp_path, WORKSHOP_REQUEUE_FILE=str(tmp_path / "requeue")).status == 0
    assert (tmp_path / "requeue").exists()
    for flags, difference in (
        (["--model", "cifar_cnn", "--dataset", "cifar10"], "model is mnist_cnn there and cifar_cnn here"),
        (["--limit_train", 40], "limit_train is 80 there and 40 here"),
        (["--optimizer", "sgd"], "optimizer is adam there and sgd here"),
        (["--batch_size", 16], "global_batch_size is 8 there and 16 here"),
        (["--loader", "shards"], "loader is memory there and shards of 1 worker(s) here, and it was saved in the mid"),
    ):
        data = ["--data_dir", data_dir] if "cifar10" in flags else []
        line = one_line(train(*MEMORY, *flags, *data, "--resume", "true", "--run_dir", tmp_path))
        assert f"{tmp_path}/checkpoint.pt is of another run: " in line and difference in line


def test_what_may_change_between_epochs_may_not_change_within_one() -> None:
    file = Path("checkpoint.pt")
    theirs = {"model": "vit", "world_size": 2, "seed": 1, "loader": "map", "only here": 1}
    mine = {"model": "vit", "world_size": 4, "seed": 2, "loader": "memory", "only there": 1}
    check_compatible(file, theirs, mine, in_epoch=None)
    with pytest.raises(UserError, match=r"seed is 1 there and 2 here.* and it was saved in the middle of epoch 3"):
        check_compatible(file, theirs, mine, in_epoch=3)
    with pytest.raises(UserError, match="another run: model is vit there and unet3d here; give"):
        check_compatible(file, theirs, mine | {"model": "unet3d"}, in_epoch=None)


def fail_with(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (MemoryError(), "no memory left"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator: can't allocate"),
    ],
    ids=["permission", "disk", "memory", "torch"],
)
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(
    train: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    assert train(*MEMORY, "--run_dir", tmp_path).status == 0
    before = {file.name: file.read_bytes() for file in tmp_path.glob("checkpoint*")}
    load = torch.load
    fail = fail_with(error)
    monkeypatch.setattr(
        torch, "load", lambda file, **how: fail() if file.name == "checkpoint.pt" else load(file, **how)
    )
    line = one_line(train(*MEMORY, "--resume", "true", "--run_dir", tmp_path))
    assert f"cannot read {tmp_path}/checkpoint.pt, which may be whole: {reason}" in line
    assert {file.name: file.read_bytes() for file in tmp_path.glob("checkpoint*")} == before


def spoiled(state: dict, *keys: object, value: object = None) -> dict:
    """The state with one of its entries taken away, or replaced by a value."""
    *path, last = keys
    inner = state
    for key in path:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return state


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: torch.zeros(3),
        lambda state: [state],
        lambda state: spoiled(state, "run"),
        lambda state: spoiled(state, "run", "step"),
        lambda state: spoiled(state, "run", "lr"),
        lambda state: spoiled(state, "optimizer"),
        lambda state: spoiled(state, "model", value=torch.zeros(3)),
        lambda state: spoiled(state, "model", value={f"module.{name}": w for name, w in state["model"].items()}),
        lambda state: spoiled(state, "scheduler", "gamma"),  # as the schedule of another lesson
        lambda state: spoiled(state, "run", "ranks", 0, "random", "torch", value=torch.zeros(3, dtype=torch.uint8)),
        lambda state: spoiled(state, "run", "ranks", 0, "random", "python", value=(3, (1, 2), None)),
    ],
)
def test_a_checkpoint_that_no_run_has_written_is_one_line(train: Script, tmp_path: Path, spoil: Callable) -> None:
    assert train(*MEMORY, "--epochs", 1, "--run_dir", tmp_path).status == 0
    torch.save(spoil(state_of(tmp_path)), tmp_path / "checkpoint.pt")
    line = one_line(train(*MEMORY, "--resume", "true", "--run_dir", tmp_path))
    assert f"{tmp_path}/checkpoint.pt does not fit this run: " in line and "choose another --run_dir" in line


def test_other_data_of_the_same_name_are_another_run(train: Script, at_step: Callable, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    flags = ["--batch_size", 8, "--loader", "memory", "--data_dir", data, "--run_dir", run]
    generate("mnist", data, train_samples=80, val_samples=16)
    at_step(6, send(signal.SIGTERM))
    assert train(*flags).status == 0
    shutil.copytree(run, tmp_path / "copy")

    generate("mnist", data, train_samples=40, val_samples=16)
    line = one_line(train(*flags, "--resume", "true"))
    assert f"{run}/checkpoint.pt is of another run: data is origin generated" in line
    assert "train_samples 80" in line and "train_samples 40" in line

    for file in data.rglob("ORIGIN.json"):  # data of the user's own, there and here
        file.unlink()
    state = spoiled(state_of(run), "run", "is", "data", value="of unknown origin")
    torch.save(state, run / "checkpoint.pt")
    line = one_line(train(*flags, "--resume", "true"))
    assert "train_samples is 80 there and 40 here; steps_per_epoch is 10 there and 5 here" in line

    generate("mnist", tmp_path / "again", train_samples=80, val_samples=16)
    early = spoiled(spoiled(state_of(tmp_path / "copy"), "run", "size"), "run", "is", "data")
    torch.save(early, run / "checkpoint.pt")  # as they were before these were noted
    resumed = train(*flags, "--data_dir", tmp_path / "again", "--resume", "true")
    assert resumed.status == 0, resumed.stderr


def test_another_learning_rate_takes_effect(train: Script, tmp_path: Path) -> None:
    assert train(*MEMORY, "--epochs", 1, "--lr", 1e-3, "--run_dir", tmp_path).status == 0
    resumed = train(*MEMORY, "--lr", 1e-4, "--resume", "true", "--run_dir", tmp_path)
    assert "after epoch 1, with --lr 0.0001 in place of 0.001" in resumed.stdout
    state = state_of(tmp_path)
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-4 * 0.7**2)
    assert state["scheduler"]["base_lrs"] == pytest.approx([1e-4])


def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint(
    train: Script, at_step: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil() -> None:
        monkeypatch.setattr(torch.Tensor, "detach", lambda loss: loss.new_tensor(math.nan))

    at_step(13, spoil)  # so the loss of the step after it
    line = one_line(train(*MEMORY, "--save_interval", 4, "--run_dir", tmp_path))
    assert "the loss is not finite in step 4 of epoch 2 on rank 0" in line
    assert f"the last good checkpoint is {tmp_path}/checkpoint.pt" in line
    assert (len(state_of(tmp_path)["run"]["epochs"]), state_of(tmp_path)["run"]["step"]) == (1, 0)


def test_weights_that_are_not_finite_are_not_saved(train: Script, tmp_path: Path) -> None:
    flags = ["--optimizer", "sgd", "--lr", 1e38, "--save_interval", 1]
    line = one_line(train(*MEMORY, *flags, "--run_dir", tmp_path))
    assert "is not finite" in line and "Try a lower --lr" in line
    for file in tmp_path.glob("checkpoint*"):
        assert all(tensor.isfinite().all() for tensor in state_of(tmp_path, file.name)["model"].values())


def test_a_disk_that_is_full_is_one_line(train: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    line = one_line(train(*MEMORY, "--run_dir", tmp_path))
    assert f"cannot write {tmp_path}/checkpoint.pt: No space left on device" in line


@pytest.mark.thorough
def test_killed_fifty_times_around_its_saves(tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "killed_often.py"
    output = subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True, text=True).stdout
    found = json.loads(output)
    assert found["statuses"] == [-signal.SIGKILL] * 50 + [0, 0]
    assert max(found["lost"]) <= 3  # the save interval
    assert found["equal"]
