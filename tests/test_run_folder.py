"""The folder of a run: one run at a time has it, and what runs have not written there is left alone."""

import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import Script
from slow_work import Clock, SlowLoader
from test_survive import one_line
from workshop.config import TrainConfig
from workshop.errors import UserError
from workshop.run import Run
from workshop.run.checkpoint import save_checkpoint
from workshop.run.position import Position

pytestmark = pytest.mark.slow

SHORT = ["--limit_train", 40, "--limit_val", 8, "--batch_size", 8, "--loader", "memory"]
CPU = torch.device("cpu")


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "01_single_gpu/train.py", *SHORT)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_run_leaves_the_users_files_alone(train: Script, tmp_path: Path) -> None:
    for name in ("results.json", "checkpoint.backup-from-may", "my.pt.trace.json.gz", "checkpoint.pt.old"):
        (tmp_path / name).write_text(f"mine: {name}")
    before = contents(tmp_path)
    for _ in range(2):
        result = train("--run_dir", tmp_path)
        assert result.status == 0, result.stderr
        assert before.items() <= contents(tmp_path).items()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1  # those of the first run were removed


def test_the_first_step_is_measured_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In it a GPU's libraries and kernels are loaded."""
    clock = Clock()
    monkeypatch.setattr("workshop.run.position.time", clock)
    with Run(TrainConfig(run_dir=tmp_path), CPU) as run:
        for _ in run.batches(SlowLoader(clock, 0.5, samples=32)):
            clock.sleep(0.25 if run.position.step else 7.0)
            run.end_step(torch.zeros(()))
            assert not run.should_save()
        run.log_epoch(1, clock.now, lr=1.0, train_loss=0.0, val_loss=0.0, val_accuracy=None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["first_step_seconds"], summary["epochs"][0]["seconds"]) == (7.5, 9.75)


@pytest.mark.parametrize("flags", [[], ["--resume", "true"], ["--benchmark", "true"]], ids=" ".join)
@pytest.mark.parametrize("name", ["summary.json", "events.out.tfevents.1.mine", "rank0.pt.trace.json.gz"])
def test_files_named_as_a_run_names_its_own_are_not_taken_for_its_own(
    train: Script, tmp_path: Path, name: str, flags: list
) -> None:
    (tmp_path / name).write_text("mine")
    for _ in range(2):
        line = one_line(train("--run_dir", tmp_path, *flags))
        assert f"no run is known to have written {tmp_path}/{name}; move it away, or choose another --run_dir" in line
    assert contents(tmp_path) == {name: b"mine", "workshop_run.lock": b""}


def test_a_folder_of_a_run_made_before_there_was_a_mark_can_be_resumed(train: Script, tmp_path: Path) -> None:
    assert train("--run_dir", tmp_path).status == 0
    (tmp_path / "workshop_run.lock").unlink()
    resumed = train("--run_dir", tmp_path, "--resume", "true", "--epochs", 2)
    assert resumed.status == 0, resumed.stderr
    assert "after epoch 1" in resumed.stdout
    assert "no run is known to have written" in one_line(train("--run_dir", tmp_path))
    assert (tmp_path / "checkpoint.pt").exists()


def test_an_empty_value_is_not_the_current_folder(train: Script, tmp_path: Path) -> None:
    for flags in (["--run_dir", ""], ["--run_dir="], ["--data_dir", ""]):
        assert f"{flags[0].strip('=')} has an empty value" in one_line(train(*flags))
    (tmp_path / "flags.yaml").write_text('run_dir: ""\n')
    assert "flags.yaml: 'run_dir' has an empty value" in one_line(train("--config", tmp_path / "flags.yaml"))


def refusal(folder: Path, **flags: bool) -> str:
    """The error of a run that another process begins in ``folder``; empty if it can begin."""
    return error_in_fork(lambda: Run(TrainConfig(run_dir=folder, **flags), CPU))


def error_in_fork(work: Callable[[], object]) -> str:
    """The user's error in work that another process does; empty if it succeeds."""
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            work()
        except UserError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(other, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"benchmark": True}], ids=str)
def test_a_folder_has_one_run_at_a_time(tmp_path: Path, flags: dict[str, bool]) -> None:
    with Run(TrainConfig(run_dir=tmp_path), CPU):
        assert refusal(tmp_path, **flags) == f"another run writes to {tmp_path}; choose another --run_dir"
    assert refusal(tmp_path, **flags) == ""


def test_a_killed_run_leaves_its_folder_to_the_next_at_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            run = Run(TrainConfig(run_dir=tmp_path), CPU)
            worker = os.fork()  # one that loads data, and notices only later that its run is gone
            if worker:
                os.write(writer, b"%d" % worker)
            time.sleep(60)
            del run
        finally:
            os._exit(0)
    worker = int(os.read(reader, 20))
    try:
        assert "another run writes" in refusal(tmp_path)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        assert refusal(tmp_path) == ""
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


@pytest.fixture
def after_a_step(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Has something done once, after the first step of the runs that follow."""

    def plan(action: Callable[[], object]) -> None:
        count_step = Position.count_step

        def count_step_then_act(position: Position, loss: torch.Tensor) -> None:
            count_step(position, loss)
            if position.finished_steps + position.step == 1:
                action()

        monkeypatch.setattr(Position, "count_step", count_step_then_act)

    return plan


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is needed")
def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_run(
    train: Script, tmp_path: Path, after_a_step: Callable
) -> None:
    after_a_step(lambda: (tmp_path / "checkpoint.tmp").symlink_to("/dev/full"))
    line = one_line(train("--run_dir", tmp_path))
    assert f"cannot write {tmp_path}/checkpoint.pt: No space left on device" in line
    assert not (tmp_path / "checkpoint.tmp").is_symlink()


def test_a_checkpoint_that_is_cut_off_is_reported_with_its_cause(tmp_path: Path) -> None:
    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        save_checkpoint(tmp_path / "checkpoint.pt", {str(part): torch.zeros(20_000) for part in range(20)})

    assert error_in_fork(save).startswith(f"cannot write {tmp_path}/checkpoint.pt: File too large;")
    assert contents(tmp_path) == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is needed")
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_a_warning_for_summary_and_curves(train: Script, tmp_path: Path, after_a_step: Callable) -> None:
    def fill() -> None:
        (tmp_path / "summary.tmp").symlink_to("/dev/full")
        for curves in tmp_path.glob("events*"):
            curves.unlink()
            curves.symlink_to("/dev/full")

    after_a_step(fill)
    result = train("--run_dir", tmp_path, "--epochs", 3, "--log_interval", 1)
    assert result.status == 0
    assert sorted(result.stderr.splitlines()) == [
        f"warning: cannot write {what} in {tmp_path}, training goes on: No space left on device"
        for what in ("curves", "summary.json")
    ]
    assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["run"]["epochs"]) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is needed")
def test_a_line_that_cannot_be_printed_is_lost_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(TrainConfig(run_dir=tmp_path), CPU) as run, open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        run.logger.log("a terminal that was closed takes no lines")
        monkeypatch.undo()
