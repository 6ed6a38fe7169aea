"""Run the doctor as a user would, on copies of the scripts, in a folder of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
DOCTOR = [sys.executable, "-m", "rankdoctor"]
Found = dict[str, str]


class Doctor:
    """Runs the doctor on copies of the scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)

    def start(self, *arguments: object) -> subprocess.Popen:
        command = [*DOCTOR, *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Return the exit status, the output and the errors."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=500)
        return process.returncode, out, err

    def report(self, *arguments: object) -> dict:
        """Return the whole report."""
        _, out, err = self.run("--json", *arguments)
        assert not err, err
        report = json.loads(out)
        assert not report["broken"]
        return report

    def findings(self, *arguments: object) -> tuple[dict, Found]:
        """Return the whole report, and for each finding the mark of the line it names."""
        report = self.report(*arguments)
        return report, {f["check"]: mark(f["at"]) for top in report["findings"] for f in (top, *top["consequences"])}


def mark(at: str) -> str:
    """Return what a line of a script, as file:number, is called there: the words after ``# LINE``."""
    file, _, line = at.rpartition(":")
    return Path(file).read_text().splitlines()[int(line) - 1].rpartition("# LINE ")[2].strip()


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of the doctor in a folder."""
    return Doctor(folder).run(*arguments)


def findings(folder: Path, *arguments: str) -> tuple[dict, dict[str, tuple[str, str, str]]]:
    """Return the report, and of each check that found something: the kind, the mark of the line, and the text."""
    report = Doctor(folder).report(*arguments)
    assert not report["errors"]
    return report, {one["check"]: (one["kind"], mark(one["at"]), one["text"]) for one in report["findings"]}


def null_gpus() -> None:
    """Compile the null GPU if that was not done before; skip the test where there can be none."""
    nullgpu = pytest.importorskip("nullgpu")
    try:
        nullgpu.environment({})
    except nullgpu.NotPossible as reason:
        pytest.skip(str(reason))


def processes_of(mark: str) -> list[str]:
    """Return the command lines of processes that name something."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in command and folder.name != str(os.getpid()):
            found.append(command)
    return found


def wait_for_process(mark: str) -> int:
    """Return the id of a process that runs a script."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if mark in words:
                return int(folder.name)
        time.sleep(0.1)
    raise AssertionError("the rank was not started")
