"""What a learner has tried and passed: ``exercises.json`` in the runs folder; and the table of a whole class."""

import getpass
import html
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clinic.catalogue import Exercise, exercises
from lab.tables import format_table
from workshop.errors import UserError, warn
from workshop.paths import write_json

NAME = "exercises.json"


class Progress:
    """The file of one learner: when each exercise was started, and what every check of it saw."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.content: dict[str, Any] = {"learner": user_name(), "started": {}, "checks": []}
        if self.path.exists():
            try:
                self.content = read(self.path)
            except UserError as error:
                kept = self.path.with_suffix(f".{int(time.time())}.unreadable")
                try:
                    self.path.rename(kept)
                    warn(f"{error}; kept as {kept.name}, and a new one begun")
                except OSError:
                    warn(f"{error}; nothing can be written there, so nothing is saved")

    def started(self, exercise: Exercise) -> None:
        """Note the first start of an exercise."""
        self.content["started"].setdefault(exercise.name, time.time())
        self._write()

    def checked(self, exercise: Exercise, seen: Sequence[str]) -> None:
        """Note a check."""
        self.content["checks"].append({"exercise": exercise.name, "time": time.time(), "seen": list(seen)})
        self._write()

    def hinted(self, exercise: Exercise, count: int) -> None:
        """Note how many hints were given."""
        self.content.setdefault("hints", {})[exercise.name] = count
        self._write()

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content, suffix=f".{os.getpid()}.tmp")
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
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if not _is_complete(content):
        raise UserError(f"{path} is not what `exercise.py check` writes")
    return content


def _is_complete(content: Any) -> bool:  # noqa: ANN401, a JSON value
    """Whether everything that is read later is there, and of the right type."""
    try:
        checks = content["checks"]
        numbers = [*content["started"].values(), *content.get("hints", {}).values(), *(one["time"] for one in checks)]
        named = isinstance(content["learner"], str) and all(isinstance(one["exercise"], str) for one in checks)
        return (
            named
            and all(isinstance(n, int | float) for n in numbers)
            and all(isinstance(one["seen"], list) for one in checks)
        )
    except (KeyError, TypeError, AttributeError):
        return False


@dataclass(frozen=True)
class Cell:
    """How far one learner is with one exercise."""

    tries: int = 0
    """checks up to the first that passed"""
    passed: bool = False
    minutes: float | None = None
    """from the first start to the first check that passed"""

    def __str__(self) -> str:
        if not self.passed:
            return f"{self.tries} tried" if self.tries else ""
        took = "" if self.minutes is None else f", {self.minutes:.0f} min"
        return f"passed ({self.tries}{took})"


def cell_of(content: dict[str, Any], name: str) -> Cell:
    """Return how far the learner of this exercises.json is with the exercise ``name``."""
    checks = [check for check in content["checks"] if check["exercise"] == name]
    first = next((i for i, check in enumerate(checks) if not check["seen"]), None)
    if first is None:
        return Cell(len(checks))
    started = content["started"].get(name)
    return Cell(first + 1, True, None if started is None else (checks[first]["time"] - started) / 60)


def class_table(folders: Iterable[Path]) -> tuple[list[str], list[tuple[str, list[Cell]]]]:
    """Return the names of all exercises, and each learner with a cell for each; most passed first.

    Raises:
        UserError: a folder holds no exercises.json, or one that cannot be read.
    """
    names = [exercise.name for exercise in exercises()]
    rows = []
    for folder in folders:
        path = folder / NAME if folder.is_dir() else folder
        content = read(path)
        rows.append((content["learner"], [cell_of(content, name) for name in names]))
    return names, sorted(rows, key=lambda row: (-sum(cell.passed for cell in row[1]), row[0]))


def as_text(names: Sequence[str], rows: Sequence[tuple[str, list[Cell]]]) -> str:
    """Return the table for a terminal: a line for each exercise that anybody tried, a column for each learner."""
    learners = [learner for learner, _ in rows]
    lines = [["exercise", *learners]]
    for i, name in enumerate(names):
        cells = [str(row[i]) for _, row in rows]
        if any(cells):
            lines.append([name, *cells])
    lines.append(["passed", *(f"{sum(cell.passed for cell in row)} of {len(names)}" for _, row in rows)])
    return format_table(lines[0], lines[1:], left=range(len(lines[0])))


STYLE = """
body { font: 20px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse }
th, td { padding: .3em .7em; border: 1px solid #ccc; text-align: left; white-space: nowrap }
.passed { background: #cfe8d5 } .tried { background: #fdeec4 } small { color: #555 }
"""


def as_html(names: Sequence[str], rows: Sequence[tuple[str, list[Cell]]]) -> str:
    """Return the table as a page for a screen at the front, which reloads itself."""
    heads = "".join(f"<th>{html.escape(learner)}</th>" for learner, _ in rows)
    lines = []
    for i, name in enumerate(names):
        cells = []
        for _, row in rows:
            cell = row[i]
            kind = "passed" if cell.passed else "tried" if cell.tries else ""
            minutes = "" if cell.minutes is None else f" <small>{cell.minutes:.0f} min</small>"
            text = f"✓ <small>{cell.tries}×</small>{minutes}" if cell.passed else f"{cell.tries}×" if cell.tries else ""
            cells.append(f'<td class="{kind}">{text}</td>')
        lines.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    sums = "".join(f"<th>{sum(cell.passed for cell in row)} of {len(names)}</th>" for _, row in rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="30">'
        f"<title>The class</title><style>{STYLE}</style></head><body>\n<h1>The class</h1>\n"
        f"<table><tr><th>exercise</th>{heads}</tr>\n{chr(10).join(lines)}\n<tr><th>passed</th>{sums}</tr></table>\n"
        f"<p>✓ passed, number of checks up to then, minutes since the start. "
        f"{time.strftime('%H:%M')}</p>\n</body></html>\n"
    )
