"""lab/measure.py: what fails or is cut does not end the rest, and a later call goes on with the next row."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import REPOSITORY
from lab import gpu_tests, measure, measurements
from workshop.errors import UserError

pytestmark = pytest.mark.slow

MACHINE = measure.Machine("null GPU (sm_90)", 1, "null_gpu_sm_90_1gpu")


def start(tmp_path: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "lab/measure.py", *words, "--out", str(tmp_path)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def row(name: str, code: str, gpus: int = 1) -> measurements.Measurement:
    """A row that runs this code, which may write down that it ran."""
    return measurements.Measurement(name, f"python -c '{code}'", ".", gpus=gpus)


def test_a_measurement_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    result = start(tmp_path, "loader")
    assert (result.returncode, result.stderr) == (2, "error: no measurement 'loader'; did you mean loaders?\n")


def test_what_is_measured_on_gpus_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = start(tmp_path, "gpu", "--minutes", "1")
    assert result.returncode == 2
    assert result.stderr.startswith("error: this machine has no NVIDIA GPU")


def test_a_failure_does_not_end_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [row("bad", "raise SystemExit(3)", gpus=0), row("good", 'print("what was printed")', gpus=0)]
    with pytest.raises(UserError, match="1 of 2 not measured"):
        measure.measure_all(rows, tmp_path)
    assert "what was printed" in capfd.readouterr().out


def test_a_call_after_a_cut_goes_on_and_repeats_nothing_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "SHORTEST", 0.1)
    ran = tmp_path / "ran"
    note = f'print("1", file=open("{ran}", "a"))'
    slow = f'import os, time; {note}; time.sleep(0 if os.path.exists("{tmp_path}/second") else 600)'
    rows = [row("good", note), row("bad", 'raise ValueError("what is wrong")'), row("slow", slow), row("late", note)]
    with pytest.raises(UserError, match="3 of 4 rows not measured"):
        measure.measure_on_gpus(rows, tmp_path, MACHINE, time.monotonic() + 6)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["good", "complete"], ["bad", "not"], ["slow", "cut"]]
    assert "bad: not measured: exit status 1: ValueError: what is wrong" in lines
    assert any(line.startswith("late: not measured: it takes") for line in lines)
    assert "times of nothing" in lines[-1], "they are null GPUs"

    (tmp_path / "second").touch()
    with pytest.raises(UserError, match="1 of 4 rows not measured"):
        measure.measure_on_gpus(rows, tmp_path, MACHINE, time.monotonic() + 600)
    assert "good                             complete before" in capfd.readouterr().out
    assert len(ran.read_text().split()) == 4, "good once, slow twice, late once"
    stored = json.loads((tmp_path / MACHINE.folder / measure.ROWS).read_text())
    assert {name: one["status"] for name, one in stored.items()} == {
        **dict.fromkeys(("good", "slow", "late"), "complete"),
        "bad": "not measured",
    }


def test_a_table_that_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    one = row("speeds", "pass")
    for content, expected in (({"rows": [], "unfinished": True}, False), ({"rows": []}, True)):
        (tmp_path / "speeds.json").write_text(json.dumps(content))
        assert measure.is_measured(one, tmp_path) is expected


def test_every_measurement_is_a_script_of_its_lesson() -> None:
    for one in (*measurements.CPU, *measurements.GPU, *measurements.TABLES):
        script = next(word for word in one.command.split() if word.endswith(".py"))
        assert (REPOSITORY / one.lesson / script).is_file(), one
        assert {words.split()[0] for words in one.data} <= measurements.TINY_DATA.keys()


TESTS = """
import time, pytest
def test_good(): pass
def test_bad(): assert not "as it is"
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_for_gpus_that_passed_does_not_run_again(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    stored = tmp_path / "tests.jsonl"

    def run_tests() -> str:
        words = [sys.executable, "-m", "pytest", "test_it.py", "-q", "-p", "lab.gpu_tests", "-n", workers]
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env = outside | {"PYTHONPATH": str(REPOSITORY), gpu_tests.FILE: str(stored)}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    run_tests()
    found = gpu_tests.read(stored)
    outcomes = {name.partition("::")[2]: one["outcome"] for name, one in found.items()}
    assert outcomes == {"test_good": "passed", "test_bad": "failed", "test_skipped": "skipped"}
    with stored.open("a") as file:
        file.write('{"test": "cut here')
    assert "1 failed" in run_tests() and len(gpu_tests.read(stored)) == 3
    assert sum("test_good" in line for line in stored.read_text().splitlines()) == 1
    gpu_tests.write_junit(gpu_tests.read(stored), tmp_path / "tests.xml")
    suite = ElementTree.parse(tmp_path / "tests.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert "as it is" in (suite.findtext("testcase/failure") or "")
