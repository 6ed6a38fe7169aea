"""The pages for instructors: numbers add up, exercises are where the page says, programs print what the mail says."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

FOLDER = REPOSITORY / "docs" / "instructors"
PAGE = (FOLDER / "README.md").read_text()
MAIL = (FOLDER / "setup_mail.md").read_text()
LESSONS = sorted(REPOSITORY.glob("0*/README.md"))


def test_the_minutes_of_the_plan_add_up_and_every_lesson_is_in_it() -> None:
    rows = re.findall(r"^\| (.+?) \|([ \d|]+)\|$", PAGE.partition("## A plan")[2].partition("## Before")[0], re.M)
    minutes = {name: [int(cell or 0) for cell in cells.replace(" ", "").split("|")] for name, cells in rows}
    together = minutes.pop("together")
    assert [sum(column) for column in zip(*minutes.values(), strict=True)] == together
    for lesson in LESSONS:
        assert any(name.endswith(f"({os.path.relpath(lesson, FOLDER)})") for name in minutes), lesson.parent.name


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda page: page.parent.name)
def test_each_exercise_of_a_lesson_has_its_answer_under_its_number(lesson: Path) -> None:
    found = re.findall(r"\*\*Exercise (\d+)\.\*\*(.*?)(?=\n\n|<details>)", lesson.read_text(), re.DOTALL)
    asked = {number: " ".join(text.split()) for number, text in found}
    name = rf"\[?{lesson.parent.name[:2]}(?:\]\(\S+\))?"
    answers = dict(re.findall(rf"^\| {name}, (\d+) \| (.+?) \| \".+\" \| .+\? \|$", PAGE, re.M))
    assert answers.keys() == asked.keys()
    for number, words in answers.items():
        assert words in asked[number], (number, words, asked[number])


def test_each_question_of_the_quiz_has_four_answers_and_one_right() -> None:
    questions, _, answers = (FOLDER / "quiz.md").read_text().partition("## Answers")
    asked = re.split(r"^## \d+\. ", questions, flags=re.M)[1:]
    assert all(re.findall(r"^- ([A-Z])\. ", question, re.M) == list("ABCD") for question in asked)
    right = re.findall(
        r"^\| (\d+) \| ([A-D]) \| .+ \| \[.+\]\(\.\./\.\./0\d_\w+/README\.md#[\w-]+\) \|$", answers, re.M
    )
    assert [int(number) for number, _ in right] == list(range(1, len(asked) + 1))


def test_programs_print_what_the_mail_says_and_what_is_typed_exists() -> None:
    preflight = (REPOSITORY / "slurm" / "preflight.py").read_text()
    assert 'f"lesson {lesson}: {answer}"' in preflight
    assert re.findall(r"^ +lesson (\w+): can run$", MAIL, re.M) == [lesson.parent.name for lesson in LESSONS]
    for quoted in ("can run", "with warnings: ", "cannot run: ", "no GPU"):
        assert quoted in preflight and quoted.rstrip(": ") in MAIL
    makefile = (REPOSITORY / "Makefile").read_text() + (REPOSITORY / "install.py").read_text()
    for quoted in [*re.findall(r'It prints "(.+?)"', MAIL), "Accuracy on the validation digits: "]:
        assert quoted in makefile and quoted in MAIL
    for quoted in ("computing on c", "epoch 1  train loss"):
        assert quoted in (REPOSITORY / "01_single_gpu" / "README.md").read_text() and quoted in MAIL
    for file in re.findall(r"^ {7}(?:python|source) ((?!\.venv)\S+\.(?:py|sh))", MAIL, re.M):
        assert (REPOSITORY / file).is_file(), file
    for target in re.findall(r"^ {7}make (\w+)$", MAIL, re.M):
        assert f"\n{target}: " in makefile


def test_the_recorded_output_of_plan_b_has_output_and_nothing_of_the_machine_that_made_it() -> None:
    linked = set(re.findall(r"\]\((\S+/example_output/\w+\.txt)\)", (FOLDER / "plan_b.md").read_text()))
    assert len(linked) > 8
    for file in linked:
        text = (FOLDER / file).read_text()
        assert len(text.splitlines()) > 2 and "Traceback" not in text
        assert str(REPOSITORY) not in text and "/tmp/" not in text and "/root" not in text


@pytest.mark.thorough
def test_the_class_can_read_what_a_run_writes_and_others_cannot(
    user_environment: dict[str, str], tmp_path: Path
) -> None:
    page = (FOLDER / "class_folder.md").read_text()
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(int(re.search(r"^chmod (3\d{3}) /shared/runs$", page, re.M)[1], 8))
    command = [sys.executable, "train.py", "--limit_train", "128", "--limit_val", "64", "--num_workers", "0"]
    subprocess.run(
        command,
        cwd=REPOSITORY / "01_single_gpu",
        env=user_environment | {"WORKSHOP_RUNS": str(runs / "ada")},
        umask=int(re.search(r"^umask (\d+)$", page, re.M)[1], 8),
        check=True,
    )
    made = list(runs.rglob("*"))
    assert len(made) > 3
    assert all(path.stat().st_mode & stat.S_IRGRP and not path.stat().st_mode & 0o007 for path in made), made
