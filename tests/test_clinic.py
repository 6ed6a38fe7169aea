"""Every exercise's faulty script and fixes are judged as they should be; its page, hints and edits are complete."""

import re
from pathlib import Path

import pytest

from clinic.catalogue import Exercise, exercises
from clinic.edits import edited
from exercise import judge
from workshop.errors import UserError

pytestmark = pytest.mark.slow

EXERCISES = exercises()
LESSONS = sorted({exercise.lesson for exercise in EXERCISES})


def check_judgements(exercise: Exercise, scripts: dict[str, tuple[str, bool]], folder: Path) -> None:
    """Let the grader judge scripts, by name and with whether they are right; fail with those that it got wrong."""
    files = []
    for name, (text, _) in scripts.items():
        (folder / name).mkdir()
        files.append(folder / name / exercise.file.name)
        files[-1].write_text(text)
    seen = dict(zip(scripts, judge(exercise, files), strict=True))
    assert {name: lines for name, lines in seen.items() if bool(lines) == scripts[name][1]} == {}
    assert not any("the check itself" in line for lines in seen.values() for line in lines), seen


FIRST = [next(exercise for exercise in EXERCISES if exercise.lesson == lesson) for lesson in LESSONS[1:3]]
"""of lessons 02 and 03: those whose checks are quick"""


@pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(one, id=one.name, marks=[] if one in FIRST else [pytest.mark.thorough, pytest.mark.fixes])
        for one in EXERCISES
    ],
)
def test_the_faulty_script_is_refused_and_its_solution_passes(exercise: Exercise, tmp_path: Path) -> None:
    check_judgements(exercise, {"fault": (exercise.faulty(), False), "solution": (exercise.fixed(), True)}, tmp_path)


@pytest.mark.thorough
@pytest.mark.fixes
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_right_fixes_pass_and_wrong_ones_are_refused(exercise: Exercise, tmp_path: Path) -> None:
    fixes = {fix.name: (edited(exercise.faulty(), fix.edit), fix.right) for fix in exercise.fixes}
    fixes.pop("solution", None)
    check_judgements(exercise, fixes, tmp_path)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_is_complete(exercise: Exercise) -> None:
    page = (exercise.folder / "README.md").read_text()
    assert page.startswith("# ")
    assert f"python ../exercise.py start {exercise.name}\n" in page
    assert f"python ../exercise.py check {exercise.name}\n" in page
    assert 1 <= len(exercise.hints) <= 3
    assert (exercise.folder / "why.md").read_text().strip()
    assert 5 <= exercise.about.minutes <= 45
    assert 1 <= exercise.about.difficulty <= 3
    others = [other for other in EXERCISES if other.lesson == exercise.lesson and other != exercise]
    assert exercise.about.order not in [other.about.order for other in others], "another exercise has the same order"
    fixes = exercise.fixes
    assert len({fix.name for fix in fixes}) == len(fixes)
    assert sum(not fix.right for fix in fixes) >= 3
    assert sum(bool(fix.about) for fix in fixes) >= 2, "usual wrong fixes are explained"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_all_edits_fit_the_lesson_s_script(exercise: Exercise) -> None:
    faulty = exercise.faulty()
    texts = [faulty, exercise.fixed(), *(edited(faulty, fix.edit) for fix in exercise.fixes)]
    assert texts.count(faulty) == 1
    for text in texts:
        compile(text, exercise.file.name, "exec")
    assert exercise.solution().startswith("@@ ")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_links_its_exercises_in_the_order_of_the_list(lesson: Path) -> None:
    linked = re.findall(r"\(exercises/(\w+)/README\.md\)", (lesson / "README.md").read_text())
    assert list(dict.fromkeys(linked)) == [exercise.name for exercise in EXERCISES if exercise.lesson == lesson]


SCRIPT = """import torch
from torch import (
    nn,
)


def train():
    # why this is one
    one = 1
    total = sum(
        one
    )  # a long comment
    return total
"""


@pytest.mark.parametrize(
    ("find", "replace", "expected"),
    [
        ("    return total\n", "    return 2\n", SCRIPT.replace("return total", "return 2")),
        ("    one = 1  # another comment\n", "", SCRIPT.replace("    one = 1\n", "")),
        ("    # any comment\n    one = 1\n", "", SCRIPT.replace("    # why this is one\n    one = 1\n", "")),
        ("    total = sum(one)\n", "    total = 3\n", SCRIPT.replace(SCRIPT[-70:-17], "    total = 3\n")),
        ("", "import os\n", SCRIPT.replace(")\n\n", ")\nimport os\n\n", 1)),
    ],
)
def test_an_edit_depends_only_on_the_code_it_is_about(find: str, replace: str, expected: str) -> None:
    assert edited(SCRIPT, f"<<<<<<< find\n{find}======= replace with\n{replace}>>>>>>>\n") == expected


@pytest.mark.parametrize(
    ("script", "edit", "message"),
    [
        (SCRIPT, "<<<<<<< find\n    total\n======= replace with\n>>>>>>>\n", "is not there"),
        ("one = 1\none = 1\n", "<<<<<<< find\none = 1\n======= replace with\n>>>>>>>\n", "is there 2 times"),
        ("one = 1\n", "<<<<<<< find\none = 1\n======= replace with\n>>>>>>\n", "in none: '<<<<<<< find'"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(script: str, edit: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        edited(script, edit)
