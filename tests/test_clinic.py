"""Every exercise's variants are judged as their folders say; its page, hints and edits are complete."""

import re
import shlex
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, NL, generate_tokens

import pytest

from clinic import as_if_cuda, course
from clinic.catalogue import REPOSITORY, Exercise, edited, exercises
from exercise import Grader
from lab.launching import load_script
from workshop.commandline import load_config
from workshop.errors import UserError

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


def in_short(exercise: Exercise) -> tuple[str, str]:
    """Return the variants that `make test` has judged, too, one wrong and one right; the others take many minutes."""
    return "fault", "right-solution" if "right-solution" in variants(exercise) else "lesson"


VARIANTS = [
    pytest.param(
        exercise,
        name,
        right,
        id=f"{exercise.name}-{name}",
        marks=[] if name in in_short(exercise) else [pytest.mark.thorough],
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


def test_a_script_asks_whether_a_device_is_cuda_in_the_same_lines() -> None:
    source = (
        'é = 1; a = x.device.type != "cpu" or y.type == "cuda"\n'
        'if (device.type\n        == "cuda"): pass\nb = z.kind == "cuda"'
    )
    others = source.split("\n")[1:]
    asked = "é = 1; a = (_type_is_cuda(x.device)) or (_type_is_cuda(y))"
    assert as_if_cuda.rewritten(source).split("\n") == [asked, *others]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_flags_on_its_page_are_understood(exercise: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exercise.lesson)
    page = (exercise.folder / "README.md").read_text().replace("\\\n", " ")
    for variable, first in re.findall(r"^for (\w+) in (\S+).*; do$", page, re.MULTILINE):
        page = page.replace(f"${variable}", first)
    commands = re.findall(
        rf"^.*\bexercise_{exercise.name}\.py\b([^`\n&|\"]*)", "\n".join(page.split("```")[1::2]), re.MULTILINE
    )
    assert commands
    own = re.findall(r"^    (\w+): \w+ = ", exercise.fault, re.MULTILINE)  # flags that only the exercise's script has
    for flags in (re.sub(rf"--({'|'.join(own)}) \S+", "", flags) if own else flags for flags in commands):
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


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_its_place_in_the_course_is_described(exercise: Exercise) -> None:
    about = exercise.about  # raises an error if about.toml is missing, or lacks a field
    assert 5 <= about.minutes <= 45
    assert 1 <= about.difficulty <= 3
    others = [other for other in EXERCISES if other.lesson == exercise.lesson and other != exercise]
    assert about.order not in [other.about.order for other in others], "another exercise has the same order"
    assert about.teaches[0].islower()
    assert len(about.teaches) <= 90
    assert len(about.wrong_fixes) >= 2
    for name, reason in about.wrong_fixes.items():
        assert (exercise.folder / "wrong" / f"{name}.edit").exists(), name
        assert ":" in reason, f"{name}: what it does, a colon, and why that is wrong"
    texts = [about.teaches, about.fault, about.fix, *about.wrong_fixes.values()]
    assert all(text and "|" not in text and not text.endswith(".") for text in texts)


def words(text: str) -> str:
    """A text in one line, so that it does not matter where its lines were broken."""
    return " ".join(text.split())


def pages_of(lesson: Path) -> str:
    """The page of a lesson, followed by its side pages."""
    side_pages = sorted(page for page in lesson.glob("*.md") if page.name != "README.md")
    return words("\n".join(page.read_text() for page in (lesson / "README.md", *side_pages)))


def place_on_page(exercise: Exercise) -> int:
    """Where the pages of its lesson start the exercise."""
    page = pages_of(exercise.lesson)
    command = f"python ../exercise.py start {exercise.name}"
    assert command in page, f"the pages of {exercise.lesson.name} do not say `{command}`"
    return page.index(command)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_what_an_exercise_needs_is_taught_before_it(exercise: Exercise) -> None:
    lessons = sorted(folder for folder in REPOSITORY.glob("0*_*") if folder.name < exercise.lesson.name)
    earlier = [pages_of(lesson) for lesson in lessons]
    before = pages_of(exercise.lesson)[: place_on_page(exercise)]
    assert exercise.about.needs
    for needed in exercise.about.needs:
        assert any(needed in page for page in (*earlier, before)), f"not explained before it: {needed}"


@pytest.mark.parametrize("lesson", sorted({exercise.lesson for exercise in EXERCISES}), ids=lambda lesson: lesson.name)
def test_a_page_starts_its_exercises_in_the_order_of_the_list(lesson: Path) -> None:
    page = pages_of(lesson)
    in_order = [exercise for exercise in EXERCISES if exercise.lesson == lesson]
    assert sorted(in_order, key=place_on_page) == in_order
    assert all(f"(exercises/{exercise.name}/README.md)" in page for exercise in in_order)


def test_an_exercise_without_a_place_in_the_course_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"about\.toml: No such file"):
        _ = Exercise(tmp_path).about
    (tmp_path / "about.toml").write_text("minutes = 10\n")
    with pytest.raises(UserError, match=r"about\.toml does not describe an exercise: .*missing.*'order'"):
        _ = Exercise(tmp_path).about


def test_the_list_of_a_page_has_every_exercise_in_order() -> None:
    rows = [line for line in course.table().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [re.search(r"`(\w+)`", row)[1] for row in rows] == [exercise.name for exercise in EXERCISES]
    assert course.count() == len(EXERCISES)
    solutions = course.solutions()
    for exercise in EXERCISES:
        assert all(text in solutions for text in (exercise.about.fault, *exercise.about.wrong_fixes.values()))
