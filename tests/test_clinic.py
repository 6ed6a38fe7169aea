"""Every exercise's variants are judged as their folders say; its page, hints and patch are whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clinic.catalogue import Exercise, exercises, patched
from exercise import Grader

EXERCISES = exercises()
VARIANTS = [
    (exercise, path)
    for exercise in EXERCISES
    for path in ["fault", "lesson", *sorted([*exercise.folder.glob("right/*.patch"), *exercise.folder.glob("wrong/*.patch")])]
]


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader() as started:
        yield started


def name_of(value: object) -> str | None:
    if isinstance(value, Exercise):
        return value.name
    return f"{value.parent.name}-{value.stem}" if isinstance(value, Path) else None


@pytest.mark.parametrize(("exercise", "variant"), VARIANTS, ids=name_of)
def test_variants_are_judged_as_their_folder_says(
    exercise: Exercise, variant: str | Path, grader: Grader, tmp_path: Path
) -> None:
    if variant == "lesson":
        text = (exercise.lesson / "train.py").read_text()
    else:
        text = exercise.faulty() if variant == "fault" else patched(exercise.faulty(), variant.read_text())
    file = tmp_path / exercise.file.name
    file.write_text(text)
    seen = grader.check(exercise, file)
    right = variant == "lesson" or (isinstance(variant, Path) and variant.parent.name == "right")
    assert not seen if right else seen
    assert not any("the script ended" in line or "the check itself" in line for line in seen)


@pytest.mark.parametrize("exercise", EXERCISES, ids=name_of)
def test_an_exercise_is_whole(exercise: Exercise) -> None:
    assert exercise.title
    assert 1 <= len(exercise.hints) <= 3
    assert (exercise.folder / "why.md").read_text().strip()
    assert len(list(exercise.folder.glob("right/*.patch"))) >= 2
    assert len(list(exercise.folder.glob("wrong/*.patch"))) >= 2
    assert f"python ../exercise.py start {exercise.name}" in (exercise.folder / "README.md").read_text()
