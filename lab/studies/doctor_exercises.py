"""Which faults of the exercises does the doctor find without knowing them? A table of all faulty scripts.

    python lab/studies/doctor_exercises.py              # all exercises: about half an hour on two cores
    python lab/studies/doctor_exercises.py held_out     # one of them, with the doctor's report

The doctor gets the command of the exercise's own page, of which it runs two epochs; if it does not find the fault,
again with all provocations. A fault counts as found if a finding names the statement that the fix changes (or one at
most three lines from there), or names this exercise.
"""

import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from clinic.catalogue import Exercise, exercises  # noqa: E402
from lab import results  # noqa: E402

NOT_FOUND = "not found"
NEAR = 3
"""lines"""
VALUES = {"$workers": "2", "$digits": "640", "$images": "1000", "$precision": "fp16"}
"""of the variables of loops on the pages"""


def flags_of(exercise: Exercise) -> list[str]:
    """Return the flags of the last command on the exercise's page that starts its script."""
    page = (exercise.folder / "README.md").read_text().replace("\\\n", " ")
    for name, value in re.findall(r'^(\w+)="(--[^"]*)"$', page, re.MULTILINE):
        page = page.replace(f"${name}", value)
    command = re.findall(rf"{exercise.file.name} (--[^\n|;&>]*)", page)[-1].split()
    flags: dict[str, str] = dict(zip(command[::2], command[1::2], strict=False))
    for flag in ("--run_dir", "--resume", "--trace", "--monitor"):
        flags.pop(flag, None)
    flags.setdefault("--epochs", "2")
    return [VALUES.get(word, word) for pair in flags.items() for word in pair]


def changed_lines(exercise: Exercise) -> set[int]:
    """Return the lines of the faulty script that its fix changes."""
    faulty, fixed = exercise.faulty().splitlines(), exercise.fixed().splitlines()
    blocks = difflib.SequenceMatcher(None, faulty, fixed, autojunk=False).get_opcodes()
    return {line for kind, i, j, _, _ in blocks if kind != "equal" for line in range(i + 1, max(j, i + 1) + 1)}


def diagnose(exercise: Exercise, copy: Path, *how: str) -> dict:
    """Return the doctor's report on the faulty script, which is run in a copy of the workshop."""
    script = copy / exercise.file.relative_to(REPOSITORY)
    script.write_text(exercise.faulty())
    options = ["--seconds", "120", *how]
    command = [sys.executable, "-m", "rankdoctor", *options, script.name, *flags_of(exercise), "--run_dir", "it"]
    environment = os.environ | {"PYTHONPATH": str(copy), "WORKSHOP_DATA": str(copy / "data")}
    done = subprocess.run(command, cwd=script.parent, env=environment, text=True, stdout=subprocess.PIPE)
    if "--json" not in how:
        print(done.stdout)
        return {"findings": []}
    return json.loads(done.stdout)


def same_statement(script: str, line: int) -> set[int]:
    """Return the lines of the simple statement on this line: the doctor names the first line of a long call."""
    simple = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, simple) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return {line}


def row_of(exercise: Exercise, report: dict) -> list[str]:
    """Return which findings are about the fault of an exercise, whether at its line, and what else was found."""
    near = {line + step for line in changed_lines(exercise) for step in range(-NEAR, NEAR + 1)}
    hits: list[str] = []
    others: list[str] = []
    at_line = False
    for finding in report["findings"]:
        file, _, line = finding["at"].rpartition(":")
        in_script = Path(file).name == exercise.file.name
        named = in_script and bool(near & same_statement(exercise.faulty(), int(line)))
        about = named or finding["exercise"] == exercise.name
        at_line |= named
        (hits if about else others).append(f"{finding['kind']} `{finding['check']}`")
    where = ("the line of the fix" if at_line else "another line") if hits else ""
    return [exercise.lesson.name[:2], f"`{exercise.name}`", ", ".join(hits) or NOT_FOUND, where, ", ".join(others)]


def judged(exercise: Exercise, copy: Path) -> list[str]:
    """Return the row of an exercise, of a plain run if the fault is found there."""
    row = row_of(exercise, diagnose(exercise, copy, "--json"))
    if row[2] == NOT_FOUND:
        row = row_of(exercise, diagnose(exercise, copy, "--json", "--thorough", "--resume", "--resume true"))
        row[2] += "" if row[2] == NOT_FOUND else " (with `--thorough`)"
    print(*row, sep=" | ", flush=True)
    return row


def prepared_copy(folder: Path) -> Path:
    """Return a copy of the workshop in this folder, with small data sets."""
    copy = folder / "workshop"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".*", "runs", "results", "tests", "tools"))
    for words in (["mnist", "--synthetic"], ["cifar10", "--synthetic"], ["text"]):
        command = [sys.executable, f"{copy}/data/prepare.py", *words, "--data_dir", f"{copy}/data"]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(copy)})
    return copy


def main() -> None:
    """Diagnose the exercises that are named, or all."""
    wanted = [exercise for exercise in exercises() if exercise.name in sys.argv[1:] or not sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        copy = prepared_copy(Path(folder))
        if sys.argv[1:]:
            for exercise in wanted:
                diagnose(exercise, copy, "--thorough", "--resume", "--resume true")
            return
        rows = [judged(exercise, copy) for exercise in wanted]
        found = sum(row[2] != NOT_FOUND for row in rows)
        results.store(
            "doctor_exercises",
            title=f"The doctor on the faulty scripts of the exercises: {found} of {len(rows)} found",
            columns=["lesson", "exercise", "found by", "named", "other findings"],
            rows=rows,
            command="python lab/studies/doctor_exercises.py",
        )


if __name__ == "__main__":
    main()
