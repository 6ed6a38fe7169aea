"""A command of a page from before the tools were projects of their own ends with one line: what to type now."""

import subprocess
import sys

import pytest

from conftest import REPOSITORY


@pytest.mark.parametrize(("file", "instead"), [("doctor/run.py", "rankdoctor "), ("nullgpu/run.py", "nullgpu ")])
def test_a_former_command_says_what_to_type(file: str, instead: str) -> None:
    command = [sys.executable, file, "--report", "train.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(f"error: type {instead}")
