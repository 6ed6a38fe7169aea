"""What a learner has tried and passed: ``exercises.json`` in the runs folder; and the table of a whole class."""

import getpass
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clinic.catalogue import Exercise, exercises
from workshop.errors import UserError, warn
from workshop.jsonfile import write_json

NAME = "exercises.json"


class Progress:
    """The file of one learner: when each exercise was started, what every check of it saw, and the hints given."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.content: dict[str, Any] = {"learner": user_name(), "started": {}, "checks": [], "hints": {}}
        if self.path.exists():
            try:
                self.content |= read(self.path)
            except UserError as error:
                kept = self.path.with_suffix(f".{int(time.time())}.unreadable")
                with suppress(OSError):
                    self.path.rename(kept)
                warn(f"{error}; kept as {kept.name}, and a new one begun")

    def started(self, exercise: Exercise) -> None:
        """Note the first start of an exercise."""
        self.content["started"].setdefault(exercise.name, time.time())
        self._write()

    def checked(self, exercise: Exercise, seen: Sequence[str]) -> None:
        """Note a check."""
        self.content["checks"].append({"exercise": exercise.name, "time": time.time(), "seen": list(seen)})
        self._write()

    def hinted(self, exercise: Exercise) -> int:
        """Note that a hint was asked for; return how many hints to give."""
        count = min(self.content["hints"].get(exercise.name, 0) + 1, len(exercise.hints))
        self.content["hints"][exercise.name] = count
        self._write()
        return count

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content)
        except OSError as error:
            warn(f"cannot write {self.path}: {error.strerror}; this is not saved")


def user_name() -> str:
    """Return the name of the user; the number, where there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return str(os.getuid())


def read(path: Path) -> dict[str, Any]:
    """Return the content of an exercises.json; raise `UserError` if it is none."""
    try:
        content = json.loads(path.read_text())
        _ = content["learner"] + "", content.get("hints", {}).items()
        for exercise in exercises():
            state(content, exercise.name)
        return content
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not what `exercise.py check` writes") from None


def state(content: dict[str, Any], name: str) -> str:
    """Return how far the learner of this exercises.json is with the exercise ``name``; "" if not begun.

    "passed (2, 15 min)" means by the second check, which was 15 minutes after the start.
    """
    checks = [check for check in content["checks"] if check["exercise"] == name]
    started = content["started"].get(name)
    for number, check in enumerate(checks, 1):
        if not check["seen"]:
            return f"passed ({number}" + (f", {(check['time'] - started) / 60:.0f} min)" if started else ")")
    return f"{len(checks)} tried" if checks else "started" if started else ""


def class_table(folders: Iterable[Path]) -> str:
    """Return what each learner of a class has tried and passed, one runs folder each, and which folders were left out.

    Raises:
        UserError: nothing can be read.
    """
    learners, left_out = [], []
    for folder in folders:
        try:
            learners.append(read(folder / NAME))
        except UserError as error:
            left_out.append(f"left out: {error}")
    if not learners:
        raise UserError(left_out[0].removeprefix("left out: "))
    names = [exercise.name for exercise in exercises()]
    rows = [[name, *(state(content, name) for content in learners)] for name in names]
    passed = [sum(row[i].startswith("passed") for row in rows) for i in range(1, len(learners) + 1)]
    table = [["exercise", *(content["learner"] for content in learners)]]
    table += [row for row in rows if any(row[1:])] + [["passed", *(f"{count} of {len(names)}" for count in passed)]]
    return "\n".join([*aligned(table), *left_out])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines in which the columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
