"""The list of faults that the modules `faulty_...` fill: functions that change the events of a correct run."""

from collections.abc import Callable

from rankdoctor.runs import Run

FAULTS: dict[str, tuple[str, int, Callable[[Run], object]]] = {}
"""for each check: kind of the finding, line, and what makes the events faulty"""


def faulty(check: str, kind: str, line: int) -> Callable:
    def register(function: Callable[[Run], object]) -> Callable[[Run], object]:
        FAULTS[check if check not in FAULTS else f"{check} ({function.__name__})"] = kind, line, function
        return function

    return register
