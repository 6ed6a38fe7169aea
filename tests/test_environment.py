"""The ways to install the workshop agree with each other."""

import re
import tomllib

import yaml

from conftest import REPOSITORY


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-")


PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_every_dependency_has_a_tested_version() -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    pinned = {name_of(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name_of(requirement) for requirement in requirements} <= pinned


def test_conda_environment_installs_what_pyproject_says() -> None:
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    assert environment["name"] == "workshop"
    python, pip, by_pip = environment["dependencies"]
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert [int(part) for part in python.removeprefix("python=").split(".")] >= [int(p) for p in minimum.split(".")]
    assert pip == "pip"
    assert by_pip["pip"] == ["-c constraints.txt", "-e .[dev]"]
