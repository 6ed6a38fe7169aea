"""How a script ends: in one line where the user can mend it, quietly where nobody reads, else as Python has it."""

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_helpers import assert_one_line
from workshop.errors import run_reporting_user_errors

WORKERS = """
import multiprocessing.reduction, os, resource, signal, sys
import torch
from workshop.distributed.ranks import ONE_PROCESS
from workshop.errors import run_reporting_user_errors
from workshop.loaders.map import MapLoader
from workshop.loaders.order import EpochOrder

class Samples(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if sys.argv[1] == "passing":  # a worker cannot send what it has loaded
            multiprocessing.reduction.DupFd = None
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1), 0

def main():
    if sys.argv[1] == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
    list(MapLoader(Samples(), EpochOrder(100, 1, ONE_PROCESS, seed=1, shuffle=True), num_workers=2))

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
def test_other_signs_of_want(error: Exception, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
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
from workshop.errors import run_reporting_user_errors, warn

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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


def test_ctrl_c_before_training_begins_is_quiet(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="130"):
        run_reporting_user_errors(raising(KeyboardInterrupt()))
    assert capsys.readouterr() == ("", "")
