"""Define checks: functions over the events of a run that yield their findings."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ..runs import Run

FAULT, NOTE, COST = "FAULT", "NOTE", "COST"
NO_VALIDATION = "no validation with a DataLoader was seen"
ONE_EPOCH = "fewer than two epochs were seen: let the script train for two"


@dataclass
class Finding:
    """Something wrong (FAULT), probably wrong (NOTE) or slow (COST)."""

    kind: str
    at: str
    """file:line of the cause"""
    text: str
    """what is wrong, with the numbers that show it"""
    fix: str
    check: str = ""
    exercise: str = ""
    """name of an exercise with such a fault; empty: there is none"""
    run: str = ""
    """the name of the run that shows it; empty: the ordinary one"""
    consequences: list["Finding"] = field(default_factory=list)
    count: int = 1
    """how often it was found, in the same words"""


def fault(at: str, text: str, fix: str, exercise: str = "") -> Finding:
    """Return something that is certainly wrong; ``exercise`` replaces the check's own."""
    return Finding(FAULT, at, text, fix, exercise=exercise)


def hint(at: str, text: str, fix: str) -> Finding:
    """Return something that is probably wrong, or that the user should know."""
    return Finding(NOTE, at, text, fix)


def cost(at: str, text: str, fix: str) -> Finding:
    """Return something that makes the training slower."""
    return Finding(COST, at, text, fix)


class CannotJudge(Exception):
    """Raised if the events do not tell whether this is right; the message says why."""


class NotUsed(CannotJudge):
    """Raised if a check does not apply to the script; the message names what the script does not use."""


@dataclass
class Check:
    """A function over events, and what the report says of it."""

    find: Callable[..., Iterable[Finding]]
    title: str
    """what is right if nothing is found, as a sentence"""
    exercise: str
    after: tuple[str, ...]
    """names of checks whose findings can be the cause of this one's"""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.find.__name__

    def findings(self, *runs: Run) -> list[Finding]:
        """Return what is found in a run, or by comparing two. Raises CannotJudge if that is nothing.

        A check without a finding has to say with `seen` what it saw done right; otherwise it could not judge.
        """
        Observed.now, found = [], []
        try:
            for finding in self.find(*runs):
                found.append(finding)
        except CannotJudge:
            if not found:
                raise
        if not found and not Observed.now:
            raise CannotJudge("the run shows nothing of it")
        for finding in found:
            finding.check, finding.run = self.name, runs[-1].launch.name
            finding.exercise = finding.exercise or self.exercise
        return found


CHECKS: list[Check] = []


def check(title: str, *, exercise: str = "", after: tuple[str, ...] = (), ranks: bool = False) -> Callable:
    """Register a check. With ``ranks`` it compares ranks, so it needs several of them."""

    def register(find: Callable[[Run], Iterator[Finding]]) -> Callable[[Run], Iterator[Finding]]:
        @functools.wraps(find)
        def with_ranks(run: Run) -> Iterator[Finding]:
            if ranks and run.world < 2:
                raise NotUsed("several ranks")
            yield from find(run)

        CHECKS.append(Check(with_ranks, title, exercise, after))
        return with_ranks

    return register


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


class Observed:
    """What the check that runs now has looked at."""

    now: ClassVar[list[str]] = []


def seen(count: int, what: str, least: int = 1) -> None:
    """Note how much a check has looked at, for the report. Raises CannotJudge if it is less than ``least``."""
    assert least > 0, "nothing is no evidence"
    if count < least:
        raise CannotJudge(f"too little was seen: {count} {what}, and at least {least} are needed")
    Observed.now.append(f"{count:,} {what}")


def shows(evidence: str) -> None:
    """Note in words what a check saw done right."""
    Observed.now.append(evidence)


def need(condition: object, reason: str) -> None:
    """Raise CannotJudge with this reason if the condition does not hold."""
    if not condition:
        raise CannotJudge(reason)


def need_none(doubts: list[str]) -> None:
    """Raise CannotJudge with the first of these reasons, if there is one."""
    if doubts:
        raise CannotJudge(doubts[0])


def need_use(condition: object, what: str) -> None:
    """Raise NotUsed if the script does not use this at all."""
    if not condition:
        raise NotUsed(what)


def need_updates(run: Run, count: int = 2) -> None:
    """Note how many updates there are. Raises CannotJudge if the weights were updated less often."""
    seen(len(run.first.all("update")), "updates", count)
