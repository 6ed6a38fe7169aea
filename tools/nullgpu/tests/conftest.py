"""What the tests share: the compiled library, and a way to run a command on null GPUs as a user does."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nullgpu import build


def pytest_ignore_collect() -> bool | None:
    """Leave out all tests where there can be no null GPU; `pytest_report_header` says why."""
    return True if impossible() else None


def pytest_report_header() -> str:
    """Say whether there can be a null GPU here."""
    return f"nullgpu: {impossible() or f'tests with torch {torch.__version__}'}"


def impossible() -> str:
    """Return why there can be no null GPU here; "" if there can be one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, so it has no code for a null GPU to run"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "the null GPU is compiled at its first use, and there is no C++ compiler (g++)"
    return ""


@dataclass
class Result:
    """What a user sees of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line of a user's mistake."""
        assert self.status == 2, f"{self.stdout[-2000:]}\n{self.stderr[-3000:]}"
        (line,) = (line for line in self.stderr.splitlines() if not line.startswith("nullgpu: compiling"))
        return line.removeprefix("nullgpu: error: ")


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library. The first worker of pytest-xdist compiles it, and the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "nullgpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.library()


@pytest.fixture(scope="session")
def nullgpu(library: Path) -> Run:
    """Runs ``nullgpu WORDS...`` with these further environment variables, with one thread per process."""

    def run(*words: object, seconds: float = 300, **more: str) -> Result:
        command = [sys.executable, "-m", "nullgpu", "--beside_gpu", *map(str, words)]
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env |= {"OMP_NUM_THREADS": "1"} | more
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
        return Result(done.returncode, done.stdout, done.stderr)

    return run
