"""The ways to install the workshop agree with each other, and tests import what its scripts do."""

import os
import re
import runpy
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from conftest import REPOSITORY, run_as_script


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-")


PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


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


def test_tests_find_the_modules_beside_the_scripts_and_none_has_a_name_that_is_taken() -> None:
    found = {script.parent for pattern in ("data/*.py", "0*/experiments/*.py") for script in REPOSITORY.glob(pattern)}
    folders = [REPOSITORY / folder for folder in PYPROJECT["tool"]["pytest"]["ini_options"]["pythonpath"]]
    assert found <= set(folders)
    names = [
        *(path.stem for folder in folders for path in folder.glob("*.py")),
        *(path.parent.name for folder in folders for path in folder.glob("*/__init__.py")),
        *(path.stem for path in Path(__file__).parent.glob("*.py")),
    ]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert sys.stdlib_module_names.isdisjoint(names)


def test_the_tests_see_no_gpu_and_leave_out_those_that_want_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    runpy.run_path(str(REPOSITORY / "tests" / "conftest.py"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "gpu" in PYPROJECT["tool"]["pytest"]["ini_options"]["norecursedirs"]


def test_a_script_gets_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "parts").mkdir(parents=True)
        (tmp_path / folder / "parts" / "__init__.py").touch()
        (tmp_path / folder / "parts" / "part.py").write_text("SEEN = []")
        (tmp_path / folder / "beside.py").write_text(f"NAME = {folder!r}")
        script = "import beside\nfrom parts.part import SEEN\nSEEN.append(beside.NAME)\nassert SEEN == [beside.NAME]"
        (tmp_path / folder / "script.py").write_text(script + f"\nassert beside.NAME == {folder!r}")
    path, modules = list(sys.path), dict(sys.modules)
    for folder in ("one", "other", "one"):
        with monkeypatch.context() as patch:
            run_as_script(tmp_path / folder / "script.py", patch)
        assert (sys.path, sys.modules) == (path, modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "one")
        import beside

        patch.setattr(beside, "NAME", "patched")
        with pytest.raises(AssertionError):  # what a test has patched is what a script gets
            run_as_script(tmp_path / "one" / "script.py", patch)
        with patch.context() as inner:
            run_as_script(tmp_path / "other" / "script.py", inner)
        assert sys.modules.pop("beside") is beside
