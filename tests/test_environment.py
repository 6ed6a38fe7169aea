"""The ways to install the workshop agree with each other."""

import re
import tomllib

import yaml

from conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONTAINER = REPOSITORY / "container"


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
    assert by_pip["pip"] == ["-c constraints.txt", *PROJECT["dependencies"], "-e ."]


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
