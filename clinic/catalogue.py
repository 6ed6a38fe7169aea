"""The exercises, each a folder ``0*/exercises/NAME`` of a lesson, and the learner's file of each.

Such a folder holds ``README.md`` (the story, the symptom), ``fault.patch`` (what makes the lesson's train.py faulty),
``hints.md`` (up to three, divided by lines of ``---``), ``why.md`` (what the mend is, and why) and ``grade.py``.
"""

import difflib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError, nearest

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
        """Where the learner works: beside train.py, so that whatever works on that one works on this one."""
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
    def patch(self) -> str:
        """The difference between the lesson's script and the faulty one."""
        return (self.folder / "fault.patch").read_text()

    @property
    def solution(self) -> str:
        """A mend, as a patch of the faulty script: `right/solution.patch` if there is one, else to the lesson's."""
        file = self.folder / "right" / "solution.patch"
        if file.exists():
            return file.read_text()
        lesson = (self.lesson / "train.py").read_text()
        texts = (text.splitlines(keepends=True) for text in (self.faulty(), lesson))
        return "".join(difflib.unified_diff(*texts, "a/train.py", "b/train.py"))

    def faulty(self) -> str:
        """Return the faulty script, made from the lesson's own as it is now."""
        return patched((self.lesson / "train.py").read_text(), self.patch)

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


def patched(script: str, patch: str) -> str:
    """Return ``script`` with ``patch``, a unified diff of one file named train.py, applied to it.

    Raises:
        UserError: git is missing, or the script is not the one that the patch was made for.
    """
    if not shutil.which("git"):
        raise UserError("git is not installed; it makes the faulty script from the lesson's own")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(script)
        environment = os.environ | {"GIT_DIR": os.devnull}  # the folder may lie within somebody's repository
        command = ["git", "apply", "--recount", "-"]
        result = subprocess.run(command, cwd=folder, env=environment, input=patch, capture_output=True, text=True)
        if result.returncode:
            raise UserError(
                "the lesson's train.py is no longer what the exercise begins with "
                f"({result.stderr.strip().splitlines()[0]}); if you changed it, put yours aside and type "
                "`git checkout train.py` in the lesson's folder"
            )
        return file.read_text()
