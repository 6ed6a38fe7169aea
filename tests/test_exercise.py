"""exercise.py as a learner uses it, also wrongly: one line, the right status, and nothing of theirs is lost."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import exercise
from clinic import progress
from clinic.catalogue import REPOSITORY, Exercise, edited, exercises, find
from data_helpers import assert_one_line
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """Call exercise.py: exit status, stdout, stderr. The learner's files and the runs folder are in ``tmp_path``."""
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(Exercise, "file", property(lambda self: tmp_path / f"exercise_{self.name}.py"))

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exercise.py", *map(str, words)])
        status = 0
        try:
            run_reporting_user_errors(exercise.main)
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[..., list[str]]]:
    with exercise.Grader() as started:
        yield lambda file, **options: started.check(find("same_half"), file, **options)


def test_list_names_every_exercise_and_how_far_one_is(run: Run) -> None:
    run("start", "same_half")
    status, out, _ = run("list")
    assert status == 0
    lines = out.splitlines()
    for exercise_found in exercises():
        about = exercise_found.about
        (line,) = [line for line in lines if f" {exercise_found.name} " in line]
        assert re.search(rf"\s{about.minutes}\s+{about.difficulty}  {re.escape(about.teaches)}", line)
    places = [out.index(f" {exercise_found.name} ") for exercise_found in exercises()]
    assert places == sorted(places)
    assert "passed: 0 of" in lines[-1]
    (mine,) = [line for line in out.splitlines() if "same_half" in line]
    assert mine.endswith("started")


def test_start_never_overwrites_what_the_learner_has(run: Run, tmp_path: Path) -> None:
    assert run("start", "same_half")[0] == 0
    file = tmp_path / "exercise_same_half.py"
    faulty = file.read_text()
    file.write_text("mine")
    status, _, err = run("start", "same_half")
    assert status == 2
    assert_one_line(err)
    assert file.read_text() == "mine"
    assert run("start", "same_half", "--again", "true")[0] == 0
    assert file.read_text() == faulty
    assert (tmp_path / "exercise_same_half.1.py").read_text() == "mine"
    run("start", "same_half", "--again", "true")
    assert (tmp_path / "exercise_same_half.1.py").read_text() == "mine"
    assert (tmp_path / "exercise_same_half.2.py").read_text() == faulty


@pytest.mark.parametrize("verb", ["start", "check", "hint", "solution"])
def test_an_unknown_exercise_is_reported_with_the_nearest(run: Run, verb: str) -> None:
    status, _, err = run(verb, "same_hlaf")
    assert status == 2
    assert_one_line(err)
    assert "did you mean same_half?" in err


def test_a_folder_in_which_nothing_can_be_written_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exercise, "file", property(lambda self: tmp_path / "missing" / f"exercise_{self.name}.py"))
    status, _, err = run("start", "same_half")
    assert status == 2
    assert_one_line(err)
    assert "cannot write" in err


def test_a_file_that_is_not_there_is_misuse(run: Run) -> None:
    status, _, err = run("check", "same_half")
    assert status == 2
    assert_one_line(err)
    assert "start same_half" in err


def test_hints_come_one_by_one_and_stop_at_the_last(run: Run) -> None:
    hints = find("same_half").hints
    for asked in range(1, len(hints) + 2):
        status, out, _ = run("hint", "same_half")
        assert status == 0
        assert [hint in out for hint in hints] == [number < asked for number in range(len(hints))]


def test_the_solution_undoes_the_fault(run: Run) -> None:
    status, out, _ = run("solution", "reborn_workers")
    assert status == 0
    changed = [line for line in out.partition("\n\n")[0].splitlines() if line.startswith(("+", "-"))]
    assert "+        persistent_workers=config.persistent_workers and config.num_workers > 0," in changed
    assert not any(line.startswith("-") for line in changed)


def test_the_solution_keeps_what_the_page_says_stays(run: Run) -> None:
    status, out, _ = run("solution", "slow_samples")
    assert status == 0
    changed = [line for line in out.splitlines() if line.startswith(("+", "-"))]
    assert '+            self.images, self.labels = arrays["images"], arrays["labels"]' in changed
    assert not any("write_archive" in line or "class" in line for line in changed)


def test_a_check_is_saved(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([["the wrong half"], []])
    monkeypatch.setattr(exercise.Grader, "check", lambda *_: next(results))
    run("start", "same_half")
    status, out, _ = run("check", "same_half")
    assert (status, out) == (1, "not yet: the wrong half\n")
    status, out, _ = run("check", "same_half")
    assert status == 0
    assert out.startswith("passed")
    content = json.loads((tmp_path / "runs" / "exercises.json").read_text())
    assert [check["seen"] for check in content["checks"]] == [["the wrong half"], []]
    cell = progress.cell_of(content, "same_half")
    assert (cell.tries, cell.passed) == (2, True)
    assert cell.minutes < 5


@pytest.mark.parametrize("content", ["[1, 2", '{"learner": "ada", "started": {}, "checks": [], "hints": []}'])
def test_an_unreadable_file_is_kept_and_a_new_one_begun(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "exercises.json").write_text(content)
    status, _, err = run("start", "same_half")
    assert status == 0
    assert err.startswith("warning: ")
    (kept,) = (tmp_path / "runs").glob("*.unreadable")
    assert kept.read_text() == content
    assert "same_half" in progress.read(tmp_path / "runs" / "exercises.json")["started"]


def test_where_nothing_can_be_saved_an_exercise_can_be_started_all_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "exercises.json").write_text("[1, 2")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(progress, "write_json", refuse)
    status, out, err = run("start", "same_half")
    assert status == 0
    assert out.startswith("wrote ")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["warning", "warning"]


def test_a_user_without_a_name_has_a_number(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr(progress.getpass, "getuser", no_name)
    assert run("start", "same_half")[0] == 0
    assert progress.read(tmp_path / "runs" / "exercises.json")["learner"] == str(os.getuid())


def a_learner(folder: Path, name: str, passed: bool, tries: int) -> Path:
    seen = [["wrong"]] * (tries - passed) + [[]] * passed
    checks = [{"exercise": "same_half", "time": 1000.0 + 60 * i, "seen": lines} for i, lines in enumerate(seen)]
    folder.mkdir()
    content = {"learner": name, "started": {"same_half": 940.0}, "checks": checks}
    (folder / "exercises.json").write_text(json.dumps(content))
    return folder


def test_the_table_of_a_class(run: Run, tmp_path: Path) -> None:
    folders = [
        a_learner(tmp_path / "a", "ada", passed=False, tries=3),
        a_learner(tmp_path / "b", "zoe<b>", passed=True, tries=2),
        a_learner(tmp_path / "c", "cyd", passed=False, tries=0),
    ]
    page = tmp_path / "class.html"
    status, out, _ = run("class", *folders, "--html", page)
    assert status == 0
    head, line, *_, last = out.splitlines()
    assert head.split() == ["exercise", "zoe<b>", "ada", "cyd"]  # most passed first, then by name
    assert line.split("  ") == ["same_half", "passed (2, 2 min)", "3 tried"]
    assert last.startswith("passed")
    html = page.read_text()
    assert "zoe&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count('class="passed"') == 1
    assert html.count('class="tried"') == 1


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{}",
        "[]",
        '{"learner": 1, "started": {}, "checks": []}',
        '{"learner": "ada", "started": {}, "checks": [{"exercise": "same_half"}]}',
        '{"learner": "ada", "started": {}, "checks": [{"exercise": "same_half", "seen": [], "time": "noon"}]}',
        '{"learner": "ada", "started": {"same_half": null}, "checks": []}',
        "nonsense",
    ],
)
def test_a_folder_without_results_is_reported(run: Run, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "x").mkdir()
    if content is not None:
        (tmp_path / "x" / "exercises.json").write_text(content)
    status, _, err = run("class", tmp_path / "x")
    assert status == 2
    assert_one_line(err)
    assert "exercises.json" in err


def test_an_edit_for_another_script_is_refused() -> None:
    with pytest.raises(UserError, match=r"no longer what the exercise begins with.*git checkout train\.py"):
        edited("print(1)\n", find("same_half").fault)


SCRIPT = """import torch
from torch import (
    nn,
)


def train():
    # why this is one
    one = 1
    total = sum(
        one
    )  # a long comment
    return total
"""


@pytest.mark.parametrize(
    ("find", "replace", "expected"),
    [
        ("    return total\n", "    return 2\n", SCRIPT.replace("return total", "return 2")),
        ("    one = 1  # another comment\n", "", SCRIPT.replace("    one = 1\n", "")),
        ("    # any comment\n    one = 1\n", "", SCRIPT.replace("    # why this is one\n    one = 1\n", "")),
        ("    total = sum(one)\n", "    total = 3\n", SCRIPT.replace(SCRIPT[-70:-17], "    total = 3\n")),
        ("", "import os\n", SCRIPT.replace(")\n\n", ")\nimport os\n\n", 1)),
    ],
)
def test_an_edit_depends_only_on_the_code_it_is_about(find: str, replace: str, expected: str) -> None:
    assert edited(SCRIPT, f"<<<<<<< find\n{find}======= replace with\n{replace}>>>>>>>\n") == expected


@pytest.mark.parametrize("find", ["return total\n", "    total\n", "    one = 1\n    return total\n"])
def test_an_edit_needs_the_code_it_is_about(find: str) -> None:
    with pytest.raises(UserError, match="is not there"):
        edited(SCRIPT, f"<<<<<<< find\n{find}======= replace with\n>>>>>>>\n")


def test_a_block_without_its_end_is_not_ignored() -> None:
    with pytest.raises(UserError, match="in none: '<<<<<<< find'"):
        edited("one = 1\n", "<<<<<<< find\none = 1\n======= replace with\none = 2\n>>>>>>\n")


def test_an_edit_that_fits_twice_is_refused() -> None:
    with pytest.raises(UserError, match="is there 2 times"):
        edited("one = 1\none = 1\n", "<<<<<<< find\none = 1\n======= replace with\n>>>>>>>\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"import torch\n\ndef main(:\n    pass\n", "line 3 is not Python"),
        (b"\xff\xfe\x00x", "not Python"),
        (b"a\0b", "not Python"),
        ("import torch\n# d\u00e9j\u00e0 vu\n".encode("latin-1"), "line 2 is not Python"),
        ("import torch\n".encode("utf-16"), "saved as UTF-16"),
        (b"import sys\nsys.exit('no data')\n", "no data"),
        (b"import sys\nsys.exit(0)\n", "without an update"),
        (b"import os\nos._exit(0)\n", "before its end"),
        (b"import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "killed by SIGSEGV"),
        (b"import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n", "ended early"),
        (b"raise ValueError('no such thing')\n", "ValueError: no such thing"),
        (b"import os\nos._exit(7)\n", "status 7"),
    ],
)
def test_a_file_that_does_not_run_is_reported_in_a_line(
    judge: Callable[..., list[str]], tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "exercise_same_half.py"
    file.write_bytes(content)
    (seen,) = judge(file)
    assert message in seen
    assert "\n" not in seen


def test_an_endless_loop_ends(judge: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "exercise_same_half.py"
    file.write_text("while True:\n    pass\n")
    assert judge(file, seconds=3) == ["no result within 3 s"]


def test_what_a_script_leaves_behind_is_ended(judge: Callable[..., list[str]], tmp_path: Path) -> None:
    file, pids = tmp_path / "exercise_same_half.py", tmp_path / "pids"
    file.write_text(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        with open({str(pids)!r} + '.new', 'w') as out:\n"
        "            out.write(f'{os.getpid()}')\n"
        f"        os.rename(out.name, {str(pids)!r})\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        f"while not os.path.exists({str(pids)!r}):\n"
        "    time.sleep(0.01)\n"
    )
    judge(file)
    pid = int(pids.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_grader_that_is_ended_takes_everything_along(tmp_path: Path) -> None:
    file, begun = tmp_path / "exercise_same_half.py", tmp_path / "begun"
    file.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    started = exercise.Grader().__enter__()
    started.process.stdin.write(json.dumps({"exercise": "same_half", "file": str(file)}) + "\n")
    started.process.stdin.flush()
    while not begun.exists():
        assert started.process.poll() is None
        time.sleep(0.05)
    everything = psutil.Process(started.process.pid).children(recursive=True)
    assert everything
    started.__exit__()
    assert not psutil.wait_procs(everything, timeout=10)[1]


def test_a_grader_that_has_ended_is_reported(tmp_path: Path) -> None:
    with exercise.Grader() as started:
        started.process.kill()
        started.process.wait()
        with pytest.raises(UserError, match="the grader ended before it had a result"):
            started.check(find("same_half"), tmp_path / "exercise_same_half.py")


def test_a_script_cannot_give_the_result_itself(judge: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "exercise_same_half.py"
    file.write_text(
        "import os, signal\n"
        "for pipe in range(3, 64):\n"
        "    try:\n"
        "        os.write(pipe, b'{\"seen\": []}')\n"
        "    except OSError:\n"
        "        pass\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    assert judge(file)


def test_forks_of_forks_lose_only_the_pipe_of_the_result() -> None:
    code = """
import os
from clinic.grader import only_in_this_process

def status_of_fork(work):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(work())

def in_rank():
    try:
        os.fstat(writing)
        return 3  # it still has the pipe
    except OSError:
        pass
    assert os.open(os.devnull, os.O_RDONLY) == writing  # the number is free again
    return status_of_fork(in_worker)

def in_worker():
    os.fstat(writing)  # this is the file now
    return 0

reading, writing = os.pipe()
result = only_in_this_process(writing)
status = status_of_fork(in_rank)
result.write("seen")
result.close()
assert os.read(reading, 10) == b"seen"
raise SystemExit(status)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_grader_that_is_ended_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    file, begun = tmp_path / "exercise_same_half.py", tmp_path / "begun"
    file.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    started = exercise.Grader().__enter__()
    started.process.stdin.write(json.dumps({"exercise": "same_half", "file": str(file)}) + "\n")
    started.process.stdin.flush()
    while not begun.exists():
        assert started.process.poll() is None
        time.sleep(0.05)
    assert list((tmp_path / "temporary").glob("clinic_*"))
    started.__exit__()
    assert not list((tmp_path / "temporary").glob("clinic_*"))


def test_the_command_line_itself(tmp_path: Path) -> None:
    script = Path(exercise.__file__)
    environment = os.environ | {"WORKSHOP_RUNS": str(tmp_path)}
    result = subprocess.run([sys.executable, script, "list"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0
    assert "same_half" in result.stdout
    assert subprocess.run([sys.executable, script], env=environment, capture_output=True).returncode == 2
