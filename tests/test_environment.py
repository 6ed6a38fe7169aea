"""The ways to install the workshop agree with each other."""

import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import yaml

import install
from conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONTAINER = REPOSITORY / "docs" / "container"
TORCH = re.search(r"^torch==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.M)[1]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-")


def test_every_dependency_has_a_tested_version() -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    pinned = {name_of(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name_of(requirement) for requirement in requirements} <= pinned


def test_conda_installs_the_packages_that_pyproject_names() -> None:
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    python, pip, by_pip = environment["dependencies"]
    oldest = [int(part) for part in PROJECT["requires-python"].removeprefix(">=").split(".")]
    assert [int(part) for part in python.removeprefix("python=").split(".")] >= oldest
    assert pip == "pip"
    dali = PROJECT["optional-dependencies"]["dali"]
    projects = [f"-e {folder.removeprefix('./')}" for folder in (*install.TOOLS, ".")]
    assert by_pip["pip"] == ["-c constraints.txt", *PROJECT["dependencies"], *dali, *projects]


def test_everything_under_tools_is_installed() -> None:
    assert sorted(install.TOOLS) == sorted(
        f"./tools/{file.parent.name}" for file in REPOSITORY.glob("tools/*/pyproject.toml")
    )


@pytest.mark.parametrize(
    ("gpus", "index"),
    [
        ([], ("cpu", "")),
        ([(580, 9.0), (580, 9.0)], ("", "")),
        ([(590, 7.0)], ("cu126", "2.14.*")),  # V100
        ([(550, 8.0)], ("cu126", "2.14.*")),
        ([(570, 10.0)], ("cu128", "2.11.*")),  # B200
    ],
)
def test_the_pytorch_follows_from_gpu_and_driver(gpus: list[tuple[int, float]], index: tuple[str, str]) -> None:
    assert install.index_for("auto", gpus) == index
    assert install.index_for("pypi", gpus) == ("", "")
    kept = install.constraints(index[1]).read_text().splitlines()
    assert any(line.startswith("jsonargparse==") for line in kept)
    assert [line for line in kept if line.startswith("torch==")] == [f"torch=={index[1] or TORCH}"]


def test_a_gpu_that_is_not_there_is_one_line() -> None:
    alone = {"PATH": "/nonexistent"}
    command = [sys.executable, "install.py", "--torch", "cuda"]
    done = subprocess.run(command, cwd=REPOSITORY, env=alone, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nvidia-smi shows no GPU") and len(done.stderr.splitlines()) == 1


def test_both_recipes_for_containers_run_the_same_steps_on_the_same_system() -> None:
    docker, apptainer = ((CONTAINER / name).read_text() for name in ("Dockerfile", "workshop.def"))
    step = re.compile(r"^(?:RUN|   ) +/opt/workshop/install\.sh (\w+)", re.M)
    assert step.findall(docker) == step.findall(apptainer) == ["packages", "python"]
    assert re.search(r"^FROM (.+)$", docker, re.M)[1] == re.search(r"^From: (.+)$", apptainer, re.M)[1]
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", docker, re.M)).split()
    assert set(copied) == sent and all((REPOSITORY / file).is_file() for file in sent)


def test_the_image_has_the_packages_of_the_local_cluster() -> None:
    script = (REPOSITORY / "slurm" / "local_cluster.sh").read_text()
    needed = re.search(r"install it with: apt-get install ([\w -]+)", script)[1].split()
    assert all(f" {package}" in (CONTAINER / "install.sh").read_text() for package in needed)


def test_if_uv_fails_pip_installs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A site often sets its proxy and its certificates for pip alone."""
    tried = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        tried.append(command)
        return SimpleNamespace(returncode=int(command[0] == "/bin/uv"), stdout="")

    monkeypatch.setattr(install, "gpus", list)
    monkeypatch.setattr(install.shutil, "which", {"uv": "/bin/uv"}.get)
    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["install.py", "--torch", "pypi"])
    install.main()
    assert [command[:3] for command in tried[1:]] == [[sys.executable, "-m", "venv"], [".venv/bin/python", "-m", "pip"]]
    assert "uv failed, and said why above; pip installs instead" in capsys.readouterr().out
