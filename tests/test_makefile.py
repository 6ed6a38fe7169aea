"""The Makefile in a folder whose name a shell must be told with care."""

import shutil
import subprocess
from pathlib import Path

from conftest import REPOSITORY

FAKE_PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
fi
echo "$PWD: $*" >>"$CALLS"
"""


def test_make_in_a_path_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder, python, calls = tmp_path / 'it\'s "my" folder', tmp_path / "fake python", tmp_path / "calls"
    (folder / "01_single_gpu").mkdir(parents=True)
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

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
