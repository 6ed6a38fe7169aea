"""The schedules for instructors: the minutes add up, and what stands in a slot fits into it."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from clinic.catalogue import exercises

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "instructors" / "schedules.md"
EXERCISES = {exercise.name: exercise for exercise in exercises()}
HOURS = {
    "Half a day": 3.5,
    "A day": 8,
    "The first day": 8,
    "The second day": 8,
    "Half a day on large models": 3 + 50 / 60,
}


@dataclass(frozen=True)
class Slot:
    begin: int
    """minutes since midnight"""
    minutes: int
    text: str

    @property
    def graded(self) -> list[str]:
        """The exercises that everybody does; others are in brackets, after a semicolon."""
        if not self.text.startswith("Graded exercise"):
            return []
        return [name for name in re.findall(r"`(\w+)`", self.text.partition("; (")[0]) if name in EXERCISES]


def schedules() -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if row := re.fullmatch(r"\| (\d+):(\d\d) \| (\d+) \| (.*) \|", line):
            slot = Slot(60 * int(row[1]) + int(row[2]), int(row[3]), row[4])
            found.setdefault(heading, []).append(slot)
    return found


def minutes_of_sections() -> dict[tuple[str, str], int]:
    """Return the minutes of a section by its lesson's folder and its anchor, from the tables of the lessons' pages."""
    found = {}
    for page in REPOSITORY.glob("0*/README.md"):
        for row in re.findall(r"^\| (.*\]\(#.*) \| +(\d+) \|", page.read_text(), re.MULTILINE):
            anchors = re.findall(r"\]\(#([\w-]+)\)", row[0])
            found[page.parent.name, anchors[0]] = int(row[1])  # a second one is in the minutes of the first
    return found


@pytest.mark.parametrize("name", HOURS)
def test_the_slots_follow_each_other_and_last_as_long_as_the_class(name: str) -> None:
    slots = schedules()[name]
    for slot, following in itertools.pairwise(slots):
        assert slot.begin + slot.minutes == following.begin, following
    assert slots[0].begin == 9 * 60 and slots[-1].minutes == 0
    assert sum(slot.minutes for slot in slots) == round(60 * HOURS[name])
    assert schedules().keys() == HOURS.keys()


@pytest.mark.parametrize("name", HOURS)
def test_nobody_sits_longer_than_two_hours(name: str) -> None:
    since = 0
    for slot in schedules()[name]:
        since = 0 if re.match(r"Break|Lunch", slot.text) else since + slot.minutes
        assert since <= 120, slot


def test_what_a_page_says_that_a_section_takes_fits_into_its_slot() -> None:
    minutes, checked = minutes_of_sections(), 0
    for slot in [slot for slots in schedules().values() for slot in slots]:
        links = re.findall(r"\]\(\.\./(0\w+)/README\.md#([\w-]+)\)", slot.text)
        needed = sum(minutes.get(link, 0) for link in links)
        assert needed <= slot.minutes, slot
        checked += needed > 0
    assert checked > 20


def test_the_exercises_of_a_schedule_fit_into_their_slots() -> None:
    taught = set()
    for slot in [slot for slots in schedules().values() for slot in slots]:
        if slot.text.startswith("Graded exercise"):
            assert slot.graded, slot
            assert sum(EXERCISES[exercise].about.minutes for exercise in slot.graded) <= slot.minutes, slot
            taught |= {EXERCISES[exercise].lesson for exercise in slot.graded}
    assert taught == {exercise.lesson for exercise in EXERCISES.values()}


@pytest.mark.parametrize("name", HOURS)
def test_an_exercise_comes_after_what_it_needs_and_only_once(name: str) -> None:
    graded = [exercise for slot in schedules()[name] for exercise in slot.graded]
    assert graded == [exercise for exercise in EXERCISES if exercise in graded], "not in teaching order"


def test_the_front_page_gives_the_minutes_of_each_shortest_path() -> None:
    front = (REPOSITORY / "README.md").read_text()
    given = dict(re.findall(r"^\| \[\d\d [^]]+\]\((\w+)/README\.md\) \| (\d+) \|", front, flags=re.MULTILINE))
    assert len(given) == 5
    for lesson, minutes in given.items():
        page = (REPOSITORY / lesson / "README.md").read_text()
        rows = re.findall(r"^\| (.+?) \| (\d+) \|(.*)\|$", page, flags=re.MULTILINE)
        path = [int(number) for name, number, text in rows if name.startswith("**[") or "shortest path" in text]
        assert sum(path) == int(minutes), lesson
