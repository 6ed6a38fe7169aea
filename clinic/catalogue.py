"""The exercises, each a folder ``0*/exercises/NAME`` of a lesson, and the learner's file of each.

Such a folder holds ``README.md`` (the page with the symptom), ``about.toml`` (its place in the course, see `About`),
``fault.edit`` (what makes the lesson's train.py faulty, see `edited`), ``hints.md`` (up to three, divided by lines of
``---``), ``why.md`` (the fix, and why it is one), ``grade.py``, and in ``right`` and ``wrong`` further edits of the
faulty script, which the tests let the grader judge.
"""

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from workshop.errors import UserError, nearest

BLOCK = re.compile(r"^<<<<<<< find\n(.*?)^======= replace with\n(.*?)^>>>>>>>$", re.DOTALL | re.MULTILINE)
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class About:
    """What ``about.toml`` says of an exercise. The lists for learners and for instructors are made from it."""

    order: int
    """its place among the exercises of its lesson: any numbers that rise in the order in which they are taught"""
    minutes: int
    """planned, from reading the page to a fix that passes"""
    difficulty: int
    """1 to 3"""
    teaches: str
    """what one knows afterwards, in less than a line, without giving the fault away"""
    needs: list[str]
    """what the page of its lesson, or of an earlier one, must explain first: words that stand there"""
    fault: str
    """what is wrong, in a line, for instructors"""
    fix: str
    """what makes it right, in a line, for instructors"""
    wrong_fixes: dict[str, str]
    """usual ones: the name of an edit in ``wrong``, and what it does and why this is wrong"""
    bonus: bool = False
    """a puzzle beside the course, for those who have time"""


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

    @cached_property
    def about(self) -> About:
        """Its place in the course.

        Raises:
            UserError: ``about.toml`` is missing, or does not have the fields of `About`.
        """
        file = self.folder / "about.toml"
        try:
            return About(**tomllib.loads(file.read_text()))
        except OSError as error:
            raise UserError(f"cannot read {shown(file)}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise UserError(f"{shown(file)} does not describe an exercise: {error}") from None

    @property
    def hints(self) -> list[str]:
        """Each says more than the one before."""
        return [hint.strip() for hint in (self.folder / "hints.md").read_text().split("\n---\n")]

    @property
    def fault(self) -> str:
        """The edit that makes the lesson's script faulty."""
        return (self.folder / "fault.edit").read_text()

    @property
    def solution(self) -> str:
        """A fix, as a difference to the faulty script: see `fixed`."""
        faulty, fixed = (text.splitlines(keepends=True) for text in (self.faulty(), self.fixed()))
        return "".join(difflib.unified_diff(faulty, fixed, "faulty", "fixed"))

    def fixed(self) -> str:
        """Return the script without its fault: by ``right/solution.edit`` if there is one, else the lesson's own."""
        file = self.folder / "right" / "solution.edit"
        return edited(self.faulty(), file.read_text()) if file.exists() else (self.lesson / "train.py").read_text()

    def faulty(self) -> str:
        """Return the faulty script, made from the lesson's own as it is now."""
        return edited((self.lesson / "train.py").read_text(), self.fault)

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


def edited(script: str, edits: str) -> str:
    """Return ``script`` with the blocks of an edit file applied to it.

    A block says which lines to find, and what to put in their place:

        <<<<<<< find
            loss_sum += loss.detach() * len(targets)
        ======= replace with
            loss_sum += loss.item() * len(targets)
        >>>>>>>

    The lines must be in the script exactly once. Only their code is compared: comments are ignored, and so are the
    places where a long line was broken. Lines without code at the beginning or end of the block, such as a comment
    above an argument, are replaced too where the script has such lines there. A block that finds nothing adds its lines
    after the last import. So an edit only depends on the code that it is about.

    Raises:
        UserError: the lines of a block are not in the script, or more than once, or a block is not complete.
    """
    if rest := BLOCK.sub("", edits).strip():
        raise UserError(f"an edit consists of blocks, and this line is in none: {rest.splitlines()[0]!r}")
    lines = script.split("\n")
    for find, replace in BLOCK.findall(edits):
        wanted, new = find.split("\n")[:-1], replace.split("\n")[:-1]
        if not wanted:
            place = _after_imports(lines)
            lines[place:place] = new
            continue
        found = _places(wanted, lines)
        if len(found) != 1:
            where = "is not there" if not found else f"is there {len(found)} times"
            first = next(line.strip() for line in wanted if _code(line))
            raise UserError(
                f"the lesson's train.py is no longer what the exercise begins with: {first!r} {where}; "
                "if you changed it, put yours aside and type `git checkout train.py` in the lesson's folder"
            )
        begin, end = found[0]
        lines[begin:end] = new
    return "\n".join(lines)


def _places(wanted: list[str], lines: list[str]) -> list[tuple[int, int]]:
    """Return where ``lines`` have the code of the lines ``wanted``: the index of the first line, and after the last."""
    code, codes = "".join(map(_code, wanted)), [_code(line) for line in lines]
    with_code = [i for i, line in enumerate(wanted) if _code(line)]
    before, after = with_code[0], len(wanted) - 1 - with_code[-1]
    indent = _indent(wanted[with_code[0]])
    places = []
    for begin in range(len(lines)):
        if not codes[begin] or _indent(lines[begin]) != indent:
            continue
        end, found = begin, ""
        while end < len(lines) and len(found) < len(code):
            found += codes[end]
            end += 1
        if found == code:
            first, last = max(0, begin - before), min(len(lines), end + after)
            while any(codes[first:begin]):
                first += 1
            while any(codes[end:last]):
                last -= 1
            places.append((first, last))
    return places


def _code(line: str) -> str:
    """Return a line without its comment and without white space."""
    return "".join(re.sub(r"(^|\s)# .*$", "", line).split())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _after_imports(lines: list[str]) -> int:
    """Return the index of the line after the last import at the top level."""
    last = max(i for i, line in enumerate(lines) if re.match(r"(from|import) \S", line))
    if lines[last].endswith("("):
        last = lines.index(")", last)
    return last + 1
