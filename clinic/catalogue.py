"""The exercises, each a folder ``0*/exercises/NAME`` of a lesson, and the learner's file of each.

Such a folder holds ``README.md`` (the page with the symptom), ``about.toml`` (its place in the course, see `About`),
``fault.edit`` (what makes the lesson's train.py faulty, see `clinic.edits`), ``fixes.edit`` (right and wrong fixes of
the faulty script, which the tests let the grader judge), ``hints.md`` (up to three, divided by lines of ``---``),
``why.md`` (the fix, and why it is one) and ``grade.py``.
"""

import difflib
import os
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clinic.edits import Fix, edited, read_fixes
from workshop.errors import UserError, nearest
from workshop.paths import REPOSITORY


@dataclass(frozen=True, kw_only=True)
class About:
    """What ``about.toml`` says of an exercise."""

    order: int
    """its position in the lesson: numbers that rise in teaching order"""
    minutes: int
    """planned time, from reading the page to a fix that passes"""
    difficulty: int
    """1 to 3"""
    teaches: str
    """what it teaches, in less than a line, without revealing the fault"""


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson."""

    folder: Path

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.folder.name

    @property
    def lesson(self) -> Path:
        """The folder of its lesson."""
        return self.folder.parent.parent

    @property
    def file(self) -> Path:
        """The learner's file, beside train.py, so that all commands for train.py work on it too."""
        return self.lesson / f"exercise_{self.name}.py"

    @cached_property
    def about(self) -> About:
        """Its place in the course."""
        return About(**tomllib.loads((self.folder / "about.toml").read_text()))

    @property
    def hints(self) -> list[str]:
        """The hints; each says more than the one before."""
        return [hint.strip() for hint in (self.folder / "hints.md").read_text().split("\n---\n")]

    @property
    def fixes(self) -> list[Fix]:
        """Right and wrong fixes."""
        return read_fixes(self.folder / "fixes.edit")

    def faulty(self) -> str:
        """Return the faulty script, made from the lesson's own as it is now."""
        return edited((self.lesson / "train.py").read_text(), (self.folder / "fault.edit").read_text())

    def fixed(self) -> str:
        """Return the script without its fault: by the fix named ``solution`` if there is one, else the lesson's own."""
        solution = next((fix for fix in self.fixes if fix.name == "solution"), None)
        return edited(self.faulty(), solution.edit) if solution else (self.lesson / "train.py").read_text()

    def solution(self) -> str:
        """Return the solution: a diff to the faulty script, its explanation, and common fixes that are wrong."""
        lines = difflib.unified_diff(self.faulty().splitlines(), self.fixed().splitlines(), lineterm="")
        text = "\n".join([*list(lines)[2:], "", (self.folder / "why.md").read_text().strip()])
        if wrong := [f"- {fix.about}" for fix in self.fixes if fix.about and not fix.right]:
            text += "\n\nCommon fixes that are wrong:\n\n" + "\n".join(wrong)
        return text

    def start(self, again: bool = False) -> None:
        """Write the learner's file.

        Raises:
            UserError: it is there already, and ``again`` does not say to begin anew; what it held is then kept beside.
                Or the file cannot be written.
        """
        text = self.faulty()
        try:
            if self.file.exists():
                if not again:
                    raise UserError(f"{shown(self.file)} is there already; --again true puts it aside and begins anew")
                kept = next(path for i in range(1, 1000) if not (path := self.file.with_suffix(f".{i}.py")).exists())
                self.file.rename(kept)
            self.file.write_text(text)
        except OSError as error:
            raise UserError(
                f"cannot write {shown(self.file)}: {error.strerror}; "
                "exercises need a copy of the workshop in which you can write"
            ) from None


def exercises() -> list[Exercise]:
    """Return all exercises in the order in which they are taught."""
    found = [Exercise(page.parent) for page in REPOSITORY.glob("0*/exercises/*/README.md")]
    return sorted(found, key=lambda exercise: (exercise.lesson.name, exercise.about.order, exercise.name))


def find(name: str) -> Exercise:
    """Return the exercise ``name``; raise `UserError`, naming the nearest, if there is none."""
    known = {exercise.name: exercise for exercise in exercises()}
    if name not in known:
        raise UserError(f"there is no exercise '{name}'; {nearest(name, known)}")
    return known[name]


def shown(path: Path) -> str:
    """Return a path as one would type it here."""
    return os.path.relpath(path)
