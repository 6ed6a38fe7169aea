"""Every exercise's variants are judged as their folders say; its page, hints and patch are whole."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from clinic.catalogue import Exercise, exercises, patched
from exercise import Grader
from lab.launching import load_script
from workshop.commandline import load_config

EXERCISES = exercises()


def variants(exercise: Exercise) -> Iterator[tuple[Exercise, str, bool, str]]:
    """Name, whether it is right, and text."""
    faulty, lesson = exercise.faulty(), (exercise.lesson / "train.py").read_text()
    yield exercise, "fault", False, faulty
    patches = sorted([*exercise.folder.glob("right/*.patch"), *exercise.folder.glob("wrong/*.patch")])
    texts = []
    for patch in patches:
        texts.append(patched(faulty, patch.read_text()))
        yield exercise, f"{patch.parent.name}-{patch.stem}", patch.parent.name == "right", texts[-1]
    if lesson not in texts:  # it is, where to take the fault out takes something wanted out too
        yield exercise, "lesson", True, lesson


VARIANTS = [variant for exercise in EXERCISES for variant in variants(exercise)]


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exercise", "right", "text"),
    [(exercise, right, text) for exercise, _, right, text in VARIANTS],
    ids=[f"{exercise.name}-{name}" for exercise, name, _, _ in VARIANTS],
)
def test_variants_are_judged_as_their_folder_says(
    exercise: Exercise, right: bool, text: str, grader: Grader, tmp_path: Path
) -> None:
    file = tmp_path / exercise.file.name
    file.write_text(text)
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
    right = [text for other, _, is_right, text in VARIANTS if is_right and other == exercise]
    assert patched(exercise.faulty(), exercise.solution) in right


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_is_whole(exercise: Exercise) -> None:
    assert exercise.title
    assert 1 <= len(exercise.hints) <= 3
    assert (exercise.folder / "why.md").read_text().strip()
    assert len(list(exercise.folder.glob("right/*.patch"))) >= 2
    assert len(list(exercise.folder.glob("wrong/*.patch"))) >= 2
    assert f"python ../exercise.py start {exercise.name}" in (exercise.folder / "README.md").read_text()
