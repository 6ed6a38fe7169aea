"""exercise.py as a learner uses it, also wrongly: one line, the right status, and nothing of theirs is lost."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import exercise
from clinic.catalogue import Exercise, exercises, find
from workshop.errors import UserError

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """Call exercise.py: exit status and output. The learner's files and the runs folder are in ``tmp_path``."""
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(Exercise, "file", property(lambda self: tmp_path / f"exercise_{self.name}.py"))

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["exercise.py", *map(str, words)])
        status = exercise.main()
        return status, capsys.readouterr().out

    return call


def test_the_command_line_itself(tmp_path: Path) -> None:
    def status_and_lines(*words: str) -> tuple[int, list[str]]:
        command = [sys.executable, exercise.__file__, *words]
        environment = os.environ | {"WORKSHOP_RUNS": str(tmp_path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        return result.returncode, result.stderr.splitlines()

    assert status_and_lines("list") == (0, [])
    assert status_and_lines()[0] == 2
    status, (line,) = status_and_lines("check", "same_hlaf")
    assert status == 2
    assert line == "error: there is no exercise 'same_hlaf'; did you mean same_half?"


def test_list_names_every_exercise_and_how_far_one_is(run: Run) -> None:
    run("start", "same_half")
    lines = run("list")[1].splitlines()
    found = [line.split()[1] for line in lines if line[:1].isdigit()]
    assert found == [exercise.name for exercise in exercises()]
    assert next(line for line in lines if "same_half" in line).endswith("started")
    assert "passed: 0 of" in lines[-1]


def test_start_never_overwrites_what_the_learner_has(run: Run, tmp_path: Path) -> None:
    run("start", "same_half")
    file = tmp_path / "exercise_same_half.py"
    faulty = file.read_text()
    file.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        run("start", "same_half")
    assert file.read_text() == "mine"
    run("start", "same_half", "--again", "true")
    assert file.read_text() == faulty
    assert (tmp_path / "exercise_same_half.1.py").read_text() == "mine"


def test_hints_come_one_by_one_and_stop_at_the_last(run: Run) -> None:
    hints = find("same_half").hints
    for asked in range(1, len(hints) + 2):
        out = run("hint", "same_half")[1]
        assert [hint in out for hint in hints] == [number < asked for number in range(len(hints))]


def test_a_check_has_a_status_and_is_saved(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="`start same_half` writes it"):
        run("check", "same_half")
    results = iter([[["the wrong half"]], [[]]])
    monkeypatch.setattr(exercise, "judge", lambda *_: next(results))
    run("start", "same_half")
    status, out = run("check", "same_half")
    verdict, help_line = out.splitlines()
    assert (status, verdict) == (1, "not yet: the wrong half")
    assert str(find("same_half").lesson) in help_line
    assert "exercise.py hint same_half" in help_line and "solution same_half" in help_line
    status, out = run("check", "same_half")
    assert status == 0
    assert out.startswith("passed")
    assert "passed (2, 0 min)" in run("list")[1]


def test_an_unreadable_file_is_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "exercises.json").write_text("[1, 2")
    assert run("start", "same_half")[0] == 0
    (kept,) = (tmp_path / "runs").glob("*.unreadable")
    assert kept.read_text() == "[1, 2"
    assert "same_half" in json.loads((tmp_path / "runs" / "exercises.json").read_text())["started"]


def test_the_table_of_a_class(run: Run, tmp_path: Path) -> None:
    for name, seen in (("ada", [["wrong"]] * 3), ("zoe", [["wrong"], []])):
        checks = [{"exercise": "same_half", "time": 1000.0 + 60 * i, "seen": lines} for i, lines in enumerate(seen)]
        content = {"learner": name, "started": {"same_half": 940.0}, "checks": checks}
        (tmp_path / name).mkdir()
        (tmp_path / name / "exercises.json").write_text(json.dumps(content))
    (tmp_path / "none").mkdir()
    out = run("class", tmp_path / "ada", tmp_path / "zoe", tmp_path / "none")[1]
    head, line, last, left_out = out.splitlines()
    assert head.split() == ["exercise", "ada", "zoe"]
    assert re.split(" {2,}", line) == ["same_half", "3 tried", "passed (2, 2 min)"]
    assert last.startswith("passed")
    assert left_out.startswith("left out: cannot read")
    with pytest.raises(UserError, match=r"exercises\.json"):
        run("class", tmp_path / "none")


@pytest.mark.thorough
def test_files_that_do_not_run_are_reported_in_a_line(tmp_path: Path) -> None:
    contents = {
        "def main(:\n    pass\n": "line 1 is not Python",
        "import sys\nsys.exit('no data')\n": "the script ended with: no data",
        "raise ValueError('no such thing')\n": "ValueError: no such thing; in 2.py, line 1: raise ValueError",
        "raise ValueError('these:\\n  two')\n": "ValueError: these: two; in 3.py, line 1: raise",
        "import os\nos._exit(7)\n": "exit status 7; the command was: python",
        "print('nothing')\n": "without an update",
        "import time\ntime.sleep(900)\n": "the script waits for ever: rank 0 in line 2 (<module>)",
    }
    files = []
    for number, content in enumerate(contents):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(content)
    for (seen,), message in zip(exercise.judge(find("bare_model"), files), contents.values(), strict=True):
        assert message in seen
        assert "\n" not in seen


def test_nothing_is_left_running_after_a_check(tmp_path: Path) -> None:
    file, pid = tmp_path / "exercise_same_half.py", tmp_path / "pid"
    file.write_text(
        "import os, subprocess, sys\n"
        "process = subprocess.Popen([sys.executable, '-c', 'import os, time; os.fork(); time.sleep(900)'])\n"
        f"open({str(pid)!r}, 'w').write(str(process.pid))\n"
        "sys.exit('no data')\n"
    )
    ((seen,),) = exercise.judge(find("same_half"), [file])
    assert "no data" in seen
    left = int(pid.read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert exercise.judge(find("same_half"), [file], limit=0.1) == [["no result within 0.1 s"]]
