"""The mail to participants: its programs print what it says that they print, and what it has people type exists."""

import re

import pytest

from conftest import REPOSITORY

PAGE = (REPOSITORY / "instructors" / "setup_mail.md").read_text()
CLUSTER, LAPTOP = re.findall(r"^```text\n(Subject: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands(mail: str) -> list[str]:
    """The lines of a mail that are to be typed: those far to the right, apart from what is printed."""
    lines = [line.strip() for line in mail.splitlines() if line.startswith("       ")]
    printed = ("lesson ", "epoch ", "Accuracy ")
    return [line for line in lines if not line.startswith(printed)]


def test_the_lines_of_the_preflight_are_those_that_it_prints() -> None:
    program = (REPOSITORY / "slurm" / "preflight.py").read_text()
    assert 'lines.append(f"lesson {LESSONS[number].name}: {answer}")' in program
    lessons = sorted(folder.name for folder in REPOSITORY.glob("0*_*"))
    assert re.findall(r"^ +lesson (\w+): can run$", CLUSTER, re.MULTILINE) == lessons
    for quoted in ("can run", "with warnings: ", "cannot run: "):
        assert quoted in program and quoted.rstrip(": ") in CLUSTER


def test_the_lines_of_make_are_those_that_it_prints() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for quoted in (
        "Installing into .venv: some gigabytes, a few minutes.",
        "Accuracy on the validation digits: ",
        ". Now read 01_single_gpu/README.md",
    ):
        assert quoted in makefile and quoted in LAPTOP


def test_the_lines_of_the_log_are_those_of_lesson_01() -> None:
    page = (REPOSITORY / "01_single_gpu" / "README.md").read_text()
    assert "computing on cuda" in CLUSTER and "`computing on cuda`" in page
    assert "epoch 1  train loss" in CLUSTER and "epoch 1  train loss" in page


@pytest.mark.parametrize("mail", [CLUSTER, LAPTOP], ids=["cluster", "laptop"])
def test_what_is_typed_exists(mail: str) -> None:
    typed = commands(mail)
    assert len(typed) >= 8
    for command in typed:
        for file in re.findall(r"(?:python|source) ((?!\.venv)[\w/]+\.(?:py|sh))", command):
            assert (REPOSITORY / file).is_file(), command
        if target := re.match(r"make (\w+)", command):
            assert f"\n{target[1]}: " in (REPOSITORY / "Makefile").read_text()
    assert "python slurm/preflight.py" in typed
    assert "<link to the quiz>" in mail and "what_is_a_gpu.md" in mail
