"""Every exercise's variants are judged as their folders say; its page, hints and edits are complete."""

import re
import shlex
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, NL, generate_tokens

import pytest

from clinic.catalogue import Exercise, edited, exercises
from exercise import Grader
from lab.launching import load_script
from workshop.commandline import load_config

EXERCISES = exercises()


def variants(exercise: Exercise) -> dict[str, bool]:
    """Names of the variants of an exercise's script, as in `text_of`, and whether each is to be judged right."""
    edits = sorted([*exercise.folder.glob("right/*.edit"), *exercise.folder.glob("wrong/*.edit")])
    found = {f"{edit.parent.name}-{edit.stem}": edit.parent.name == "right" for edit in edits}
    return {"fault": False} | found | {"lesson": True}


def text_of(exercise: Exercise, variant: str) -> str:
    """The script of a variant."""
    if variant == "fault":
        return exercise.faulty()
    if variant == "lesson":
        return (exercise.lesson / "train.py").read_text()
    return edited(exercise.faulty(), (exercise.folder / f"{variant.replace('-', '/', 1)}.edit").read_text())


def code_of(text: str) -> list[str]:
    """The code of a script, without comments."""
    return [token.string for token in generate_tokens(StringIO(text).readline) if token.type not in (COMMENT, NL)]


ALWAYS = ("fault", "lesson", "right-solution")
"""the variants that `make test` has judged, too; the others take many minutes"""
VARIANTS = [
    pytest.param(
        exercise,
        name,
        right,
        id=f"{exercise.name}-{name}",
        marks=[] if name in ALWAYS else [pytest.mark.thorough],
    )
    for exercise in EXERCISES
    for name, right in variants(exercise).items()
]


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "variant", "right"), VARIANTS)
def test_variants_are_judged_as_their_folder_says(
    exercise: Exercise, variant: str, right: bool, grader: Grader, tmp_path: Path
) -> None:
    if variant == "lesson":  # it is wrong where something must stay that the lesson does not have
        others = (text_of(exercise, name) for name, is_right in variants(exercise).items() if not is_right)
        right = code_of(text_of(exercise, variant)) not in map(code_of, others)
    file = tmp_path / exercise.file.name
    file.write_text(text_of(exercise, variant))
    seen = grader.check(exercise, file)
    assert not seen if right else seen, seen
    assert not any("the script ended" in line or "the check itself" in line for line in seen), seen


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_flags_on_its_page_are_understood(exercise: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exercise.lesson)
    page = (exercise.folder / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(
        rf"^.*\bexercise_{exercise.name}\.py\b([^`\n&|\"]*)", "\n".join(page.split("```")[1::2]), re.MULTILINE
    )
    assert commands
    for flags in commands:
        load_config(load_script(exercise.lesson).Config, shlex.split(flags))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_solution_is_judged_right(exercise: Exercise) -> None:
    assert exercise.fixed() in [text_of(exercise, name) for name, right in variants(exercise).items() if right]
    changed = [line for line in exercise.solution.splitlines()[2:] if line.startswith(("+", "-"))]
    before, after = exercise.faulty().splitlines(), exercise.fixed().splitlines()
    assert changed
    assert all(line[1:] in (after if line[0] == "+" else before) for line in changed)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_is_complete(exercise: Exercise) -> None:
    assert exercise.title
    assert 1 <= len(exercise.hints) <= 3
    assert (exercise.folder / "why.md").read_text().strip()
    assert len(list(exercise.folder.glob("right/*.edit"))) >= 2
    assert len(list(exercise.folder.glob("wrong/*.edit"))) >= 2
    assert f"python ../exercise.py start {exercise.name}" in (exercise.folder / "README.md").read_text()
