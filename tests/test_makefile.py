"""The Makefile in a folder whose name must be quoted in a shell."""

import shutil
import subprocess
from pathlib import Path

from conftest import REPOSITORY

FAKE_PYTHON = """#!/bin/sh
if [ "$1" = install.py ]; then
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
fi
echo "$PWD: $*" >>"$CALLS"
"""


def fake_python(file: Path) -> Path:
    file.write_text(FAKE_PYTHON)
    file.chmod(0o755)
    return file


def test_make_in_a_path_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder, python, calls = tmp_path / 'it\'s "my" folder', fake_python(tmp_path / "fake python"), tmp_path / "calls"
    (folder / "01_single_gpu").mkdir(parents=True)
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name in ("install.py", "pyproject.toml", "constraints.txt"):
        (folder / name).touch()

    def make(target: str) -> None:
        command = ["env", f"CALLS={calls}", "make", target, f"PYTHON={python}"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    make("demo")
    here, lesson, *rest = dict.fromkeys(line.partition(": ")[0] for line in calls.read_text().splitlines())
    assert (Path(here), Path(lesson), rest) == (folder, folder / "01_single_gpu", [])
    assert (folder / ".venv" / "installed").exists()

    users = [folder / name for name in ("runs/mine/summary.json", "01_single_gpu/7.log", "01_single_gpu/7.lprof")]
    users += [tmp_path / "it's", folder / "own.egg-info" / "file"]
    for file in [*users, folder / "runs" / "demo" / "summary.json", folder / "01_single_gpu" / "demo.lprof"]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    make("clean")
    assert all(file.exists() for file in users)
    made = (".venv", "runs/demo", "01_single_gpu/demo.lprof")
    assert not [name for name in made if (folder / name).exists()]


def test_the_gpu_tests_run_without_installing_anything(tmp_path: Path) -> None:
    folder, calls = tmp_path / "a folder", tmp_path / "calls"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name in ("install.py", "pyproject.toml", "constraints.txt"):
        (folder / name).touch()

    def test_gpu(python: Path | str) -> subprocess.CompletedProcess:
        command = ["env", f"CALLS={calls}", "make", "test-gpu", f"PYTHON={python}"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    own = fake_python(folder / "bin" / "own python")
    assert test_gpu(own).returncode == 0
    assert "-m pytest tests/gpu" in calls.read_text()
    assert "venv" not in calls.read_text() and not (folder / ".venv").exists()

    without_torch = test_gpu("false")
    assert without_torch.returncode == 2
    assert "needs a python with torch and pytest" in without_torch.stderr

    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "tested").touch()
    fake_python(folder / ".venv" / "bin" / "python")
    assert test_gpu("false").returncode == 0
