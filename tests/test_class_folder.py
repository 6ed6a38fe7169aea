"""The folder of a class: what learners with their own accounts write there, the instructor can read, and strangers not.

It needs root, because it acts as several users.
"""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conftest import REPOSITORY
from sources import generate

PAGE = (REPOSITORY / "instructors" / "class_folder.md").read_text()
GROUP, ADA, BOB, INSTRUCTOR, STRANGER = 64_000, 64_001, 64_002, 64_003, 64_004
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as several users")


def as_user(user: int, command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command as a user who is in a group of their own and, but for the stranger, in that of the class."""
    groups = [] if user == STRANGER else [GROUP]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"USER": f"user{user}", "LOGNAME": f"user{user}", "HOME": str(folder)} | environment,
        user=user,
        group=user,
        extra_groups=groups,
        umask=0o077,  # as many clusters have it; site.sh has another one
        capture_output=True,
        text=True,
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of the runs, made with the permissions of the page, by the instructor."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)  # pytest's folders are for one user alone
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, INSTRUCTOR, GROUP)
    folder.chmod(int(re.search(r"^chmod (3\d{3}) /shared/runs$", PAGE, re.MULTILINE)[1], 8))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> tuple[str, str]:
    """A Python that every user may run, and the folders of modules that it needs: perhaps that of the system."""
    site = os.pathsep.join([str(REPOSITORY), sysconfig.get_path("purelib")])
    for file in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        tried = as_user(ADA, ["bash", "-c", f"{file} -c 'import torch'"], Path("/"), PYTHONPATH=site)
        if tried.returncode == 0:
            return file, site
    pytest.skip("no Python that another user may run")


def learner(user: int, home: Path, runs: Path, command: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Do as a learner: source the lines of the page's site.sh, then run a command."""
    home.mkdir(exist_ok=True)
    os.chown(home, user, user)
    lines = [line for line in PAGE.splitlines() if line.startswith(("export WORKSHOP_RUNS=", "umask "))]
    assert len(lines) == 2
    site = "\n".join(lines).replace("/shared/runs", str(runs))
    return as_user(user, ["bash", "-ec", f"{site}\n{shlex.join(command)}"], home, **environment)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_instructor_reads_the_runs_of_learners_and_a_stranger_does_not(
    runs: Path, tmp_path: Path, python: tuple[str, str]
) -> None:
    interpreter, site = python
    generate("mnist", tmp_path / "data", train_samples=128, val_samples=64)
    for file in [tmp_path / "data", *(tmp_path / "data").rglob("*")]:
        file.chmod(file.stat().st_mode | 0o055)
    setting = {"WORKSHOP_DATA": str(tmp_path / "data"), "PYTHONPATH": site, "PYTHONDONTWRITEBYTECODE": "1"}
    train = [interpreter, str(REPOSITORY / "01_single_gpu" / "train.py"), "--num_workers", "0"]
    exercises = [interpreter, str(REPOSITORY / "exercise.py")]
    code = "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom clinic import progress\n"
    code += "from clinic.catalogue import find\nfrom workshop.paths import default_runs_dir\n"
    code += "progress.Progress(default_runs_dir()).started(find('same_half'))"
    for user in (ADA, BOB):
        home = tmp_path / f"home{user}"
        done = learner(user, home, runs, train, **setting)
        assert done.returncode == 0, done.stderr
        done = learner(user, home, runs, [interpreter, "-c", code, str(REPOSITORY)], **setting)
        assert done.returncode == 0, done.stderr

    summary = runs / f"user{ADA}" / "01_single_gpu" / "mnist" / "summary.json"
    assert summary.stat().st_gid == GROUP
    made = [path for path in runs.rglob("*")]
    assert len(made) > 8
    for path in made:
        assert path.stat().st_mode & stat.S_IRGRP and not path.stat().st_mode & 0o007, path

    seen = as_user(INSTRUCTOR, ["cat", str(summary)], tmp_path)
    assert json.loads(seen.stdout)["lesson"] == "01_single_gpu"
    table = as_user(INSTRUCTOR, ["bash", "-c", f"{shlex.join([*exercises, 'class'])} {runs}/*"], tmp_path, **setting)
    assert table.returncode == 0, table.stderr
    assert table.stdout.splitlines()[0].split() == ["exercise", f"user{ADA}", f"user{BOB}"]
    assert "left out" not in table.stdout

    assert as_user(STRANGER, ["cat", str(summary)], tmp_path).returncode != 0
    assert as_user(STRANGER, ["ls", str(runs)], tmp_path).returncode != 0
    assert as_user(BOB, ["rm", "-rf", str(runs / f"user{ADA}")], tmp_path).returncode != 0
    assert as_user(BOB, ["mv", str(runs / f"user{ADA}"), str(runs / "mine")], tmp_path).returncode != 0
    assert summary.is_file()


def test_without_the_line_on_the_umask_the_instructor_cannot_read_a_run(runs: Path, tmp_path: Path) -> None:
    folder = runs / "ada"
    assert as_user(ADA, ["mkdir", str(folder)], tmp_path).returncode == 0
    assert as_user(INSTRUCTOR, ["ls", str(folder)], tmp_path).returncode != 0
