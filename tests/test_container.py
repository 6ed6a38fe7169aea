"""With docs/container/bin first in PATH, the commands of the pages start in the image; apptainer is emulated."""

import os
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY


def in_image(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of docs/container/bin with a program for apptainer that prints its arguments, one per line."""
    (folder / "apptainer").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "apptainer").chmod(0o755)
    return subprocess.run(
        [REPOSITORY / "docs" / "container" / "bin" / command, "train.py", "--lr", "a b"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", ["python", "kernprof", "torchrun", "tensorboard", "nullgpu", "rankdoctor"])
def test_a_command_starts_in_the_image(command: str, tmp_path: Path) -> None:
    image, data = tmp_path / "my image.sif", tmp_path / "data"
    image.touch()
    data.mkdir()
    result = in_image(command, tmp_path, WORKSHOP_IMAGE=str(image), WORKSHOP_DATA=str(data), WORKSHOP_RUNS="/not/there")
    binds = ["--bind", f"{REPOSITORY},{data}"]
    inside = [str(image), command, "train.py", "--lr", "a b"]
    path = ":".join(str(REPOSITORY / folder) for folder in ("", "tools/nullgpu/src", "tools/rankdoctor/src"))
    assert result.stdout.splitlines() == ["exec", "--nv", *binds, "--env", f"PYTHONPATH={path}", *inside]


def test_another_program_starts_in_its_image(tmp_path: Path) -> None:
    result = in_image("python", tmp_path, WORKSHOP_IMAGE_COMMAND="apptainer --module=gpu --image=docker:workshop:1")
    assert result.stdout.splitlines() == [
        "--module=gpu",
        "--image=docker:workshop:1",
        "python",
        "train.py",
        "--lr",
        "a b",
    ]


def test_without_an_image_one_line_says_what_to_do(tmp_path: Path) -> None:
    result = in_image("python", tmp_path, WORKSHOP_IMAGE="/not/there.sif")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: python: WORKSHOP_IMAGE names no file: '/not/there.sif'; see docs/container.md\n"
