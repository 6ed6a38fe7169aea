"""The recipes for containers run the same commands, and commands of a job start in the image; apptainer is emulated."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY

CONTAINER = REPOSITORY / "container"
WRAPPED = ["python", "kernprof", "torchrun", "tensorboard"]


def steps(recipe: str) -> list[str]:
    return re.findall(r"^(?:RUN|   ) +/opt/workshop/install\.sh (\w+)", (CONTAINER / recipe).read_text(), re.MULTILINE)


def test_both_recipes_run_the_same_steps() -> None:
    assert steps("Dockerfile") == steps("workshop.def") == ["packages", "python"]


def test_both_recipes_begin_with_the_same_system() -> None:
    (docker,) = re.findall(r"^FROM (.+)$", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE)
    (apptainer,) = re.findall(r"^From: (.+)$", (CONTAINER / "workshop.def").read_text(), re.MULTILINE)
    assert docker == apptainer


def test_docker_gets_what_the_recipe_copies() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE)
    assert {file for line in copied for file in line.split()} == sent
    assert all((REPOSITORY / file).is_file() for file in sent)


def test_the_image_has_the_packages_of_the_local_cluster() -> None:
    installed = (CONTAINER / "install.sh").read_text()
    (named,) = re.findall(
        r"install it with: apt-get install ([\w -]+)", (REPOSITORY / "slurm/local_cluster.sh").read_text()
    )
    assert all(f" {package}" in installed for package in named.split())


def in_image(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of container/bin with a program for apptainer that prints its arguments, one per line."""
    (folder / "apptainer").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "apptainer").chmod(0o755)
    return subprocess.run(
        [CONTAINER / "bin" / command, "train.py", "--lr", "a b"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", WRAPPED)
def test_a_command_starts_in_the_image(command: str, tmp_path: Path) -> None:
    image, data = tmp_path / "my image.sif", tmp_path / "data"
    image.touch()
    data.mkdir()
    result = in_image(command, tmp_path, WORKSHOP_IMAGE=str(image), WORKSHOP_DATA=str(data), WORKSHOP_RUNS="/not/there")
    binds = ["--bind", f"{REPOSITORY},{data}"]
    inside = [str(image), command, "train.py", "--lr", "a b"]
    assert result.stdout.splitlines() == ["exec", "--nv", *binds, "--env", f"PYTHONPATH={REPOSITORY}", *inside]


@pytest.mark.parametrize("image", ["", "/not/there.sif"])
def test_without_an_image_one_line_says_what_to_do(image: str, tmp_path: Path) -> None:
    result = in_image("python", tmp_path, WORKSHOP_IMAGE=image)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: python: WORKSHOP_IMAGE names no file: '{image}'; see container/README.md\n"
