"""The course that the exercises make up, as the pages show it; cog calls the functions that return Markdown."""

import os
from itertools import groupby
from pathlib import Path

from clinic.catalogue import REPOSITORY, Exercise, exercises


def table(folder: str = "clinic") -> str:
    """Return all exercises in the order in which they are taught, for a page that is in ``folder``."""
    lines = ["| | exercise | minutes | difficulty | what it teaches |", "| ---: | --- | ---: | ---: | --- |"]
    for lesson, members in groupby(exercises(), key=lambda exercise: exercise.lesson):
        lines.append(f"| | **[{lesson.name}]({_link(lesson, folder)}/README.md)** | | | |")
        lines += [_row(exercise, folder) for exercise in members]
    return "\n".join(lines)


def lesson_list(lesson: str) -> str:
    """Return the exercises of a lesson as a numbered list, for the page of the lesson."""
    members = [exercise for exercise in exercises() if exercise.lesson.name == lesson]
    return "\n".join(
        f"{number}. `python ../exercise.py start {exercise.name}` "
        f"([exercise page]({_link(exercise.folder, lesson)}/README.md)): {_minutes(exercise)}"
        for number, exercise in enumerate(members, 1)
    )


def count() -> int:
    """Return how many exercises there are."""
    return len(exercises())


def solutions() -> str:
    """Return a table for each lesson: every exercise with its fault, its fix, and the usual wrong fixes."""
    parts = []
    for lesson, members in groupby(exercises(), key=lambda exercise: exercise.lesson):
        lines = [
            f"#### {lesson.name}",
            "",
            "| exercise | the fault | the fix | usual wrong fixes, and why they are wrong |",
            "| --- | --- | --- | --- |",
        ]
        for exercise in members:
            about = exercise.about
            wrong = "<br>".join(f"• {text}" for text in about.wrong_fixes.values())
            link = f"[`{exercise.name}`]({_link(exercise.folder, '.')}/README.md)"
            lines.append(f"| {link} ({_minutes(exercise)}) | {about.fault} | {about.fix} | {wrong} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(exercise: Exercise, folder: str) -> str:
    about = exercise.about
    number = [other.name for other in exercises()].index(exercise.name) + 1
    name = f"[`{exercise.name}`]({_link(exercise.folder, folder)}/README.md)"
    teaches = f"{about.teaches} (bonus)" if about.bonus else about.teaches
    return f"| {number} | {name} | {about.minutes} | {about.difficulty} | {teaches} |"


def _minutes(exercise: Exercise) -> str:
    return f"{exercise.about.minutes} minutes{', bonus' if exercise.about.bonus else ''}"


def _link(path: Path, folder: str) -> str:
    return os.path.relpath(path, REPOSITORY / folder)
