"""Exercises with a silent fault: find it with the workshop's instruments, fix it, and check whether you did.

python exercise.py list             # all, in teaching order, and which of them you have passed
python exercise.py start NAME       # writes exercise_NAME.py beside the lesson's train.py: find its fault there
python exercise.py check NAME       # runs it and says what is still wrong; exit status 0 if it passed, 1 if not
python exercise.py hint NAME        # a first hint; asked again, a second and a third
python exercise.py solution NAME    # what the fault was, and why
python exercise.py class DIR...     # of runs folders: who has passed what, as text, and as HTML with --html FILE
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clinic import progress
from clinic.catalogue import REPOSITORY, Exercise, exercises, find, shown
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.paths import default_runs_dir


class Grader:
    """The process that judges learners' files, started once; see `clinic.grader`."""

    def __enter__(self) -> "Grader":
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clinic.grader"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.communicate()

    def check(self, exercise: Exercise, file: Path, **options: float) -> list[str]:
        """Return what is still seen to be wrong with the file.

        Raises:
            UserError: the grader has ended.
        """
        request = {"exercise": exercise.name, "file": str(file.resolve()), **options}
        assert self.process.stdin and self.process.stdout, "started with pipes"
        answer = ""
        with suppress(BrokenPipeError):  # it has ended; without this, it would look as if nobody read what we print
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise UserError("the grader ended before it had a result; its messages are above")
        return json.loads(answer)["seen"]


def list_exercises() -> None:
    """Print all exercises in the order in which they are taught, and how far this learner is with each."""
    mine = progress.Progress(default_runs_dir()).content
    cells = {exercise.name: progress.cell_of(mine, exercise.name) for exercise in exercises()}
    rows, lesson = [], None
    for number, exercise in enumerate(exercises(), 1):
        if exercise.lesson != lesson:
            lesson = exercise.lesson
            rows.append(["", lesson.name, "", "", "", ""])
        about = exercise.about
        state = str(cells[exercise.name]) or ("started" if exercise.file.exists() else "")
        teaches = f"{about.teaches} (bonus)" if about.bonus else about.teaches
        rows.append([str(number), exercise.name, str(about.minutes), str(about.difficulty), teaches, state])
    head = ["", "exercise", "minutes", "difficulty", "what it teaches", ""]
    print(format_table(head, rows, left=(1, 4, 5)))
    print(f"\npassed: {sum(cell.passed for cell in cells.values())} of {len(cells)}; difficulty: from 1 to 3")


def start(exercise: Exercise, again: bool) -> None:
    """Write the learner's file and say where it is, and what to read."""
    exercise.start(again)
    progress.Progress(default_runs_dir()).started(exercise)
    print(f"wrote {shown(exercise.file)}; its page: {shown(exercise.folder / 'README.md')}")


def check(exercise: Exercise) -> int:
    """Judge the learner's file; return the exit status."""
    if not exercise.file.is_file():
        raise UserError(f"{shown(exercise.file)} is not there; `start {exercise.name}` writes it")
    with Grader() as grader:
        seen = grader.check(exercise, exercise.file)
    progress.Progress(default_runs_dir()).checked(exercise, seen)
    for line in seen:
        print(f"not yet: {line}")
    if not seen:
        print(f"passed: {exercise.name}; `solution {exercise.name}` says what it was about")
    return 1 if seen else 0


def hint(exercise: Exercise) -> None:
    """Print the next hint, and the ones before."""
    given = progress.Progress(default_runs_dir())
    count = min(given.content.setdefault("hints", {}).get(exercise.name, 0) + 1, len(exercise.hints))
    for number, text in enumerate(exercise.hints[:count], 1):
        print(f"hint {number} of {len(exercise.hints)}: {text}\n")
    given.hinted(exercise, count)


def solution(exercise: Exercise) -> None:
    """Print a fix, and why it is one."""
    print("\n".join(line for line in exercise.solution.splitlines() if not line.startswith(("---", "+++"))))
    print()
    print((exercise.folder / "why.md").read_text().strip())


def show_class(folders: Sequence[str], page: str | None) -> None:
    """Print the table of a class, and write it as HTML."""
    names, rows = progress.class_table(map(Path, folders))
    print(progress.as_text(names, rows))
    if page:
        try:
            Path(page).write_text(progress.as_html(names, rows))
        except OSError as error:
            raise UserError(f"cannot write {page}: {error.strerror}") from None


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|start|check|hint|solution|class")
    verbs.add_parser("list")
    for verb in ("start", "check", "hint", "solution"):
        verbs.add_parser(verb).add_argument("name")
    verbs.choices["start"].add_argument("--again", choices=["true", "false"], default="false")
    table = verbs.add_parser("class")
    table.add_argument("folders", nargs="+", metavar="DIR")
    table.add_argument("--html", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.verb == "list":
        list_exercises()
    elif arguments.verb == "class":
        show_class(arguments.folders, arguments.html)
    elif arguments.verb == "start":
        start(find(arguments.name), arguments.again == "true")
    else:
        sys.exit({"check": check, "hint": hint, "solution": solution}[arguments.verb](find(arguments.name)) or 0)


if __name__ == "__main__":
    run_reporting_user_errors(main)
