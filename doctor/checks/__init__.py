"""The checks, and judging runs with them."""

from collections.abc import Iterable

from ..events import Run
from . import files, randomness, samples, speed, steps, updates, validation, weights
from .base import CHECKS, COST, FAULT, NOTE, CannotJudge, Finding
from .runs import COMPARISONS

__all__ = ["CHECKS", "COST", "FAULT", "NOTE", "Diagnosis", "Finding", "judge"]
MODULES = (samples, validation, weights, steps, updates, randomness, files, speed)


class Diagnosis:
    """What the checks say of one or several runs of a script."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.fine: list[str] = []
        """titles of checks that could be judged, and found nothing"""
        self.unjudged: dict[str, str] = {}
        """title of a check: why it could not be judged"""
        self.broken: dict[str, str] = {}
        """name of a check: the error in it"""

    @property
    def faults(self) -> list[Finding]:
        """The certain findings."""
        return [finding for finding in self.findings if finding.kind == FAULT]


def judge(runs: list[Run]) -> Diagnosis:
    """Return what the checks find in runs of the same script; the first one is the ordinary run."""
    diagnosis = Diagnosis()
    found: list[Finding] = []
    for check in CHECKS:
        reasons, new, judged = [], [], False
        for run in runs:
            try:
                new += check.findings(run)
                judged = True
            except CannotJudge as reason:
                reasons.append(str(reason))
            except Exception as error:  # a fault of the doctor must not hide what the other checks find
                diagnosis.broken[check.name] = repr(error)
        found += new
        if judged and not new and check.name not in diagnosis.broken:
            diagnosis.fine.append(check.title)
        elif not judged and check.name not in diagnosis.broken:
            diagnosis.unjudged[check.title] = reasons[0]
    for compare in COMPARISONS:
        found += compare(runs, diagnosis.fine, diagnosis.unjudged)
    diagnosis.findings = with_causes(once(found))
    return diagnosis


def once(findings: Iterable[Finding]) -> list[Finding]:
    """Leave out findings that an earlier run has shown already."""
    seen, kept = set(), []
    for finding in findings:
        key = finding.check, finding.at
        if key not in seen:
            seen.add(key)
            kept.append(finding)
    return kept


def with_causes(findings: list[Finding]) -> list[Finding]:
    """Put each finding under its cause, if that was found in the same run; sort the rest by kind."""
    after = {check.name: check.after for check in CHECKS}
    rest = []
    for finding in findings:
        causes = [f for f in findings if f.check in after.get(finding.check, ()) and f.run == finding.run and f.kind != COST]
        causes = [f for f in causes if f is not finding]
        if causes:
            causes[0].consequences.append(finding)
        else:
            rest.append(finding)
    return sorted(rest, key=lambda finding: (FAULT, NOTE, COST).index(finding.kind))
