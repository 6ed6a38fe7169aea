"""The folder of a run: one run at a time has it, and what runs have not written there is left alone."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import Script
from test_survive import one_line
from workshop.config import TrainConfig
from workshop.errors import UserError
from workshop.run import Run

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
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1  # those of the first run have made room


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


def told(folder: Path, **flags: bool) -> str:
    """What the user is told of a run that another process begins in ``folder``; nothing if it can begin."""
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            Run(TrainConfig(run_dir=folder, **flags), CPU)
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
        assert told(tmp_path, **flags) == f"another run writes to {tmp_path}; choose another --run_dir"
    assert told(tmp_path, **flags) == ""


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
        assert "another run writes" in told(tmp_path)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        assert told(tmp_path) == ""
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)
