"""How a script ends: in one line where the user can fix it, quietly where nobody reads, else as Python does."""

import errno
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import REPOSITORY
from data_helpers import assert_one_line
from workshop.commandline import run_with_config
from workshop.config import TrainConfig
from workshop.entry import check_clone, run_reporting_user_errors

WORKERS = """
import multiprocessing.reduction, os, resource, signal, sys
import torch
from workshop.entry import run_reporting_user_errors
from workshop.loaders import init_worker

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if sys.argv[1] == "passing":  # a worker cannot send what it has loaded
            multiprocessing.reduction.DupFd = None
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1), 0

def main():
    if sys.argv[1] == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
    list(torch.utils.data.DataLoader(Samples(), num_workers=2, worker_init_fn=init_worker))

run_reporting_user_errors(main)
"""


@pytest.mark.parametrize(
    ("lack", "reason"),
    [("killed", "DataLoader worker (pid"), ("files", "oo many open files"), ("passing", "DataLoader worker (pid")],
)
def test_loader_workers_that_lack_something_are_one_line(lack: str, reason: str) -> None:
    result = subprocess.run([sys.executable, "-c", WORKERS, lack], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert_one_line(result.stderr)
    assert reason in result.stderr and "take fewer --num_workers, or give the job more memory" in result.stderr


FULL = "unable to write to file </torch_1_2_0>: No space left on device (28)"


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    "error", [RuntimeError(f"Caught\nTraceback\nRuntimeError: {FULL}\n"), OSError(errno.ENOMEM, "")]
)
def test_other_errors_from_a_lack_of_resources(
    error: Exception, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # is put back afterwards
    with pytest.raises(SystemExit, match="2"):
        run_reporting_user_errors(raising(error))
    assert_one_line(capsys.readouterr().err)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), OSError(errno.ENOENT, "No such file")])
def test_no_other_error_is_hidden(error: Exception) -> None:
    with pytest.raises(type(error)) as found:
        run_reporting_user_errors(raising(error))
    assert found.value is error


PRINTING = """
import sys
from pathlib import Path
from workshop.entry import run_reporting_user_errors
from workshop.errors import warn

def main():
    warn("careful")
    Path(sys.argv[1]).write_text("saved")
    for _ in range(int(sys.argv[2])):
        print("a line")

run_reporting_user_errors(main)
"""


@pytest.mark.parametrize("lines", [1, 100_000])
def test_it_ends_quietly_when_nobody_reads(lines: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", PRINTING, str(saved), str(lines)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as head does when it has seen enough
    assert process.stderr.read() == "warning: careful\n"
    assert process.wait() == 1
    assert saved.read_text() == "saved"


@pytest.mark.parametrize(("closed", "stdout", "stderr"), [(1, "", "warning: careful\n"), (2, "a line\n", "")])
def test_a_closed_stream_is_no_mistake(closed: int, stdout: str, stderr: str, tmp_path: Path) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}>&-', "", sys.executable, "-c", PRINTING, tmp_path / "saved", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, stdout, stderr)
    assert (tmp_path / "saved").read_text() == "saved"


def clone(folder: Path, script: str) -> Path:
    """Another clone, as far as it matters: with a package of its own, and a script that uses the package it gets."""
    for file in (folder / "workshop" / "errors.py", folder / script):
        file.parent.mkdir(parents=True, exist_ok=True)
    (folder / "workshop" / "errors.py").touch()
    (folder / script).write_text("def main(config=None):\n    print('runs')\n")
    return folder / script


@pytest.mark.parametrize("script", ["01_single_gpu/train.py", "03_ddp/experiments/allreduce.py", "data/prepare.py"])
def test_a_script_of_one_clone_with_the_package_of_another_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, script: str
) -> None:
    main = runpy.run_path(str(clone(tmp_path / "mine", script)))["main"]
    with pytest.raises(SystemExit, match="2"):
        run_reporting_user_errors(main)
    out, error = capsys.readouterr()
    assert out == ""
    assert_one_line(error)
    mine = tmp_path / "mine"
    assert f"{mine / script} got the package of another clone, {REPOSITORY / 'workshop'}" in error
    assert f"`make setup` in {mine}" in error and f"export PYTHONPATH={mine}`" in error


def test_a_lesson_with_the_package_of_another_clone_does_not_read_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(clone(tmp_path / "mine", "01_single_gpu/train.py")))["main"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--no_such_flag"])
    with pytest.raises(SystemExit, match="2"):
        run_with_config(main, TrainConfig, None)
    error = capsys.readouterr().err
    assert "got the package of another clone" in error and "no_such_flag" not in error


def test_a_copied_script_and_a_clone_under_another_name_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    alone = clone(tmp_path / "mine", "lesson/train.py")
    (tmp_path / "mine" / "workshop" / "errors.py").unlink()
    (tmp_path / "link").symlink_to(REPOSITORY)
    linked = tmp_path / "link" / "tests" / Path(__file__).name
    run_reporting_user_errors(runpy.run_path(str(alone))["main"])
    check_clone(linked)
    check_clone(REPOSITORY / "01_single_gpu" / "train.py")
    assert capsys.readouterr().out == "runs\n"


def test_ctrl_c_before_training_begins_is_quiet(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="130"):
        run_reporting_user_errors(raising(KeyboardInterrupt()))
    assert capsys.readouterr() == ("", "")
