"""Checks that run only if the user asks for them, because they compute something of their own."""

from collections.abc import Callable, Iterator

from ..runs import Run
from .base import Check, Finding

ASKED: list[Check] = []
FLAGS: dict[str, str] = {}
"""by the name of a check: the flag that asks for it"""


def asked(flag: str, title: str, after: tuple[str, ...] = ()) -> Callable:
    """Register a check that runs with this flag; ``after`` has the names of checks whose FAULTs can be its cause."""

    def register(find: Callable[[Run], Iterator[Finding]]) -> Callable[[Run], Iterator[Finding]]:
        check = Check(find, title, "", after)
        ASKED.append(check)
        FLAGS[check.name] = flag
        return find

    return register


def asked_for(runs: list[Run]) -> list[Check]:
    """Return the checks that were asked for in these runs."""
    flags = {flag for run in runs for flag in run.launch.asked}
    return [check for check in ASKED if FLAGS[check.name] in flags]
