"""Exercises with a silent fault: find it with the workshop's instruments, fix it, and check whether you did.

python exercise.py list             # all, in teaching order, and which of them you have passed
python exercise.py start NAME       # writes exercise_NAME.py beside the lesson's train.py: find its fault there
python exercise.py check NAME       # runs it and says what is still wrong; exit status 0 if it passed, 1 if not
python exercise.py hint NAME        # a first hint; asked again, a second and a third
python exercise.py solution NAME    # what the fault was, and why
python exercise.py class DIR...     # of runs folders: who has passed what
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clinic import progress
from clinic.catalogue import Exercise, exercises, find, shown
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY, default_runs_dir

LIMIT = 600
"""time limit in seconds for judging a file on a busy machine; an idle one takes about 15"""


def list_exercises() -> None:
    """Print all exercises in the order in which they are taught, and how far this learner is with each."""
    mine = progress.Progress(default_runs_dir()).content
    rows = [["", "exercise", "minutes", "difficulty", "what it teaches", ""]]
    lesson = None
    for number, exercise in enumerate(exercises(), 1):
        if exercise.lesson != lesson:
            lesson = exercise.lesson
            rows.append(["", lesson.name, "", "", "", ""])
        about, state = exercise.about, progress.state(mine, exercise.name)
        rows.append([str(number), exercise.name, str(about.minutes), str(about.difficulty), about.teaches, state])
    print("\n".join(progress.aligned(rows)))
    passed = sum(row[-1].startswith("passed") for row in rows)
    print(f"\npassed: {passed} of {number}; difficulty: from 1 to 3")


def start(exercise: Exercise, again: bool) -> None:
    """Write the learner's file and say where it is, and what to read."""
    exercise.start(again)
    progress.Progress(default_runs_dir()).started(exercise)
    print(f"wrote {shown(exercise.file)}; its page: {shown(exercise.folder / 'README.md')}")
    print(help_for(exercise))


def help_for(exercise: Exercise) -> str:
    """Return where to type the commands of an exercise, and what helps a learner who is stuck."""
    return (
        f"type the commands of its page in {exercise.lesson}; if you are stuck: "
        f"python ../exercise.py hint {exercise.name}, then solution {exercise.name}"
    )


def check(exercise: Exercise) -> int:
    """Judge the learner's file; return the exit status."""
    if not exercise.file.is_file():
        raise UserError(f"{shown(exercise.file)} is not there; `start {exercise.name}` writes it")
    (seen,) = judge(exercise, [exercise.file])
    progress.Progress(default_runs_dir()).checked(exercise, seen)
    for line in seen:
        print(f"not yet: {line}")
    if seen:
        print(help_for(exercise))
    else:
        print(f"passed: {exercise.name}; `solution {exercise.name}` says what it was about")
    return 1 if seen else 0


def judge(exercise: Exercise, files: Sequence[Path], limit: float = LIMIT) -> list[list[str]]:
    """Return what the grader still finds wrong with each file; see `clinic.check`.

    The files are run in a process group of their own, of which nothing is left when this returns, for at most ``limit``
    seconds each.
    """
    outside_jobs = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    environment = outside_jobs | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "clinic.check", exercise.name, *(str(file.resolve()) for file in files)]
    with tempfile.TemporaryDirectory(prefix="clinic_", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        timed_out = False
        try:
            out, _ = process.communicate(timeout=limit * len(files))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if timed_out:
            out, _ = process.communicate()
    seen = [json.loads(line) for line in out.splitlines()]
    if not timed_out and len(seen) < len(files):
        raise UserError("the check ended before it had a result; its messages are above")
    return seen + [[f"no result within {limit:g} s"]] * (len(files) - len(seen))


def hint(exercise: Exercise) -> None:
    """Print the next hint, and the ones before."""
    count = progress.Progress(default_runs_dir()).hinted(exercise)
    for number, text in enumerate(exercise.hints[:count], 1):
        print(f"hint {number} of {len(exercise.hints)}: {text}\n")


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|start|check|hint|solution|class")
    verbs.add_parser("list")
    for verb in ("start", "check", "hint", "solution"):
        verbs.add_parser(verb).add_argument("name")
    verbs.choices["start"].add_argument("--again", choices=["true", "false"], default="false")
    verbs.add_parser("class").add_argument("folders", nargs="+", metavar="DIR", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "list":
        list_exercises()
    elif arguments.verb == "class":
        print(progress.class_table(arguments.folders))
    elif arguments.verb == "start":
        start(find(arguments.name), arguments.again == "true")
    elif arguments.verb == "check":
        return check(find(arguments.name))
    elif arguments.verb == "hint":
        hint(find(arguments.name))
    else:
        print(find(arguments.name).solution())
    return 0


if __name__ == "__main__":
    run_reporting_user_errors(lambda: sys.exit(main()))
