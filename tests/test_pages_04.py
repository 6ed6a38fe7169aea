"""The pages of lesson 04: minutes and exercises."""

import re

from conftest import REPOSITORY

LESSON = REPOSITORY / "04_mixed_precision"
PAGE = (LESSON / "README.md").read_text()
SIDE_PAGES = re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", (LESSON / "experiments" / "README.md").read_text(), re.MULTILINE)


def minutes() -> dict[str, tuple[int, bool]]:
    """The minutes of each section, and whether it is on the shortest path."""
    rows = re.findall(r"^\| (\**)\[([^]]+)\]\(#([\w-]+)\)\**\ \| (\d+) \|", PAGE, re.MULTILINE)
    return {name: (int(number), bool(bold)) for bold, name, _, number in rows}


def test_the_minutes_add_up() -> None:
    sections = minutes()
    headings = re.findall(r"^#{2,3} (.+)$", PAGE, re.MULTILINE)
    assert [heading for heading in headings if heading in sections] == list(sections)
    shortest = sum(number for number, bold in sections.values() if bold)
    whole = sum(number for number, _ in sections.values())
    assert f"takes about {whole} minutes" in PAGE
    assert f"shortest path takes {shortest} minutes" in PAGE


def test_the_exercises_are_numbered_in_reading_order() -> None:
    pages = [PAGE, *((LESSON / "experiments" / name).read_text() for name in SIDE_PAGES)]
    numbers = [int(number) for page in pages for number in re.findall(r"^\*\*Exercise (\d+)\.\*\*", page, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {file.name for file in (LESSON / "experiments").glob("*.md")} == {*SIDE_PAGES, "README.md"}
