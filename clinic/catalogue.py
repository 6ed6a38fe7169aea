"""The exercises, each a folder ``0*/exercises/NAME`` of a lesson, and the learner's file of each.

Such a folder holds ``README.md`` (the page with the symptom), ``fault.edit`` (what makes the lesson's train.py faulty,
see `edited`), ``hints.md`` (up to three, divided by lines of ``---``), ``why.md`` (the fix, and why it is one),
``grade.py``, and in ``right`` and ``wrong`` further edits of the faulty script, which the tests let the grader judge.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError, nearest

BLOCK = re.compile(r"^<<<<<<< find\n(.*?)^======= replace with\n(.*?)^>>>>>>>$", re.DOTALL | re.MULTILINE)
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson."""

    folder: Path

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.folder.name

    @property
    def lesson(self) -> Path:
        """The folder of its lesson."""
        return self.folder.parent.parent

    @property
    def file(self) -> Path:
        """Where the learner works: beside train.py, so that everything that works on train.py works on it too."""
        return self.lesson / f"exercise_{self.name}.py"

    @property
    def title(self) -> str:
        """What its page is headed with."""
        return (self.folder / "README.md").read_text().splitlines()[0].removeprefix("# ")

    @property
    def hints(self) -> list[str]:
        """Each more telling than the one before."""
        return [hint.strip() for hint in (self.folder / "hints.md").read_text().split("\n---\n")]

    @property
    def fault(self) -> str:
        """The edit that makes the lesson's script faulty."""
        return (self.folder / "fault.edit").read_text()

    @property
    def solution(self) -> str:
        """A fix, as a difference to the faulty script: `right/solution.edit` if there is one, else the lesson's."""
        texts = (text.splitlines(keepends=True) for text in (self.faulty(), self.fixed()))
        return "".join(difflib.unified_diff(*texts, "faulty", "fixed"))

    def fixed(self) -> str:
        """Return the faulty script with the solution applied."""
        file = self.folder / "right" / "solution.edit"
        return edited(self.faulty(), file.read_text()) if file.exists() else (self.lesson / "train.py").read_text()

    def faulty(self) -> str:
        """Return the faulty script, made from the lesson's own as it is now."""
        return edited((self.lesson / "train.py").read_text(), self.fault)

    def start(self, again: bool = False) -> None:
        """Write the learner's file.

        Raises:
            UserError: it is there already, and ``again`` does not say to begin anew; what it held is then kept beside.
        """
        if self.file.exists():
            if not again:
                raise UserError(f"{shown(self.file)} is there already; --again true puts it aside and begins anew")
            kept = next(path for i in range(1, 1000) if not (path := self.file.with_suffix(f".{i}.py")).exists())
            self.file.rename(kept)
        self.file.write_text(self.faulty())


def exercises() -> list[Exercise]:
    """Return all exercises in the order of the lessons."""
    return [Exercise(page.parent) for page in sorted(REPOSITORY.glob("0*/exercises/*/README.md"))]


def find(name: str) -> Exercise:
    """Return the exercise ``name``; raise `UserError`, naming the nearest, if there is none."""
    known = {exercise.name: exercise for exercise in exercises()}
    if name not in known:
        raise UserError(f"there is no exercise '{name}'; {nearest(name, known)}")
    return known[name]


def shown(path: Path) -> str:
    """Return a path as one would type it here."""
    return os.path.relpath(path)


def edited(script: str, edits: str) -> str:
    """Return ``script`` with the blocks of an edit file applied to it.

    A block says which lines to find, and what to put in their place:

        <<<<<<< find
            loss_sum += loss.detach() * len(targets)
        ======= replace with
            loss_sum += loss.item() * len(targets)
        >>>>>>>

    The lines must be in the script exactly once; comments at their ends are ignored. A block that finds nothing adds
    its lines after the last import. So an edit only depends on the lines that it is about.

    Raises:
        UserError: the lines of a block are not in the script, or more than once.
    """
    lines = script.split("\n")
    for find, replace in BLOCK.findall(edits):
        wanted, new = find.split("\n")[:-1], replace.split("\n")[:-1]
        if not wanted:
            place = _after_imports(lines)
            lines[place:place] = new
            continue
        codes, wanted_codes = [_code(line) for line in lines], [_code(line) for line in wanted]
        found = [i for i in range(len(lines)) if codes[i : i + len(wanted)] == wanted_codes]
        if len(found) != 1:
            where = "is not there" if not found else f"is there {len(found)} times"
            raise UserError(
                "the lesson's train.py is no longer what the exercise begins with: "
                f"{next(filter(None, wanted_codes)).strip()!r} {where}; if you changed it, put yours aside and type "
                "`git checkout train.py` in the lesson's folder"
            )
        lines[found[0] : found[0] + len(wanted)] = new
    return "\n".join(lines)


def _code(line: str) -> str:
    """Return a line without the comment at its end."""
    return re.sub(r"\s+# .*$", "", line).rstrip()


def _after_imports(lines: list[str]) -> int:
    """Return the index of the line after the last import at the top level."""
    last = max(i for i, line in enumerate(lines) if re.match(r"(from|import) \S", line))
    if lines[last].endswith("("):
        last = lines.index(")", last)
    return last + 1
