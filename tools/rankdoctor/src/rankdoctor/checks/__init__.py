"""The checks, and judging runs with them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..runs import Launch, Run
from . import (
    apart,
    divided,
    files,
    gathered,
    influence,
    meanings,
    optimized,
    passes,
    randomness,
    reference,
    samples,
    speed,
    steps,
    streams,
    totals,
    updates,
    validation,
    weights,
)
from .asked import asked_for
from .base import CHECKS, COST, FAULT, NOTE, CannotJudge, Check, Finding, NotUsed, Observed
from .comparisons import COMPARISONS

__all__ = ["CHECKS", "COST", "FAULT", "NOTE", "Diagnosis", "Finding", "judge"]
MODULES = (
    samples,
    streams,
    meanings,
    validation,
    weights,
    divided,
    optimized,
    steps,
    updates,
    gathered,
    passes,
    totals,
    randomness,
    files,
    speed,
    influence,
    reference,
)


class Diagnosis:
    """The results of all checks for one or several runs of a script."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.fine: dict[str, str] = {}
        """title of a check that found nothing: what it has looked at, such as "updates: 24" """
        self.unjudged: dict[str, str] = {}
        """title of a check: why it could not be judged"""
        self.unused: dict[str, str] = {}
        """title of a check: what the script does not use"""
        self.broken: dict[str, str] = {}
        """name of a check: the error in it"""

    @property
    def faults(self) -> list[Finding]:
        """The certain findings, including the consequences of others."""
        return [finding for finding in self.findings if finding.kind == FAULT]


def judge(runs: list[Run]) -> Diagnosis:
    """Return what the checks find in runs of the same script; the first one is the ordinary run.

    Of a run under a provocation only faults count, because it is not how the user runs the script.
    """
    diagnosis, found = Diagnosis(), []
    for run in runs:
        run.ordinary = None if run is runs[0] else runs[0]
    # a run in which no weight moves is there to be compared only
    trained = [run for run in runs if run.ranks and run.launch.provocation != "frozen"]
    for check in CHECKS:
        found += apply(check, [(run,) for run in trained], diagnosis)
    for check in asked_for(runs):
        found += apply(check, [(run,) for run in trained], diagnosis)
    for name, check in COMPARISONS.items():
        cases = [partners(runs, second) for second in runs if second.launch.compared == name]
        if cases:
            found += apply(check, cases, diagnosis)
    wrong = {finding.check: finding for finding in found if finding.kind == FAULT}
    further = (*COMPARISONS.values(), *asked_for(runs))
    explained = {check.name for check in further if wrong.keys() & set(check.after)}
    if runs and averages_now_and_then(runs[0]):  # a stopped run, or one with NaN, may not come to that
        found = [f for f in found if f.check != "weights_agree" or f.run not in names_of_cut(runs)]
    found = [finding for finding in found if finding.check not in explained]
    for check in (*CHECKS, *COMPARISONS.values()):
        if check.title in diagnosis.fine and (causes := [wrong[name] for name in check.after if name in wrong]):
            del diagnosis.fine[check.title]
            diagnosis.unjudged[check.title] = f"{causes[0].at.rpartition('/')[2]} has a fault that comes first"
    diagnosis.findings = with_causes(counted(once(found)))
    return diagnosis


def averages_now_and_then(run: Run) -> bool:
    """Return whether the ranks of a run train apart, and average all or some of their weights at times."""
    return apart.drift(run) or bool(run.ranks and weights.joined_later(run.aligned("gradients")))


def names_of_cut(runs: list[Run]) -> set[str]:
    """Return the names of the runs that were stopped or resumed, or that compute with numbers of the doctor's."""
    return {run.launch.name for run in runs if run.launch.provocation in ("resume", "nan", "outliers", "skip")}


def partners(runs: list[Run], second: Run) -> tuple[Run | None, ...]:
    """Return the ordinary run and another one; between them, for a resumed run, the run that was stopped before it.

    Of runs whose weights do not move, all three are: on several ranks, on one with smaller batches, and on one.
    """
    if second.launch.compared == "frozen":
        others = [run for run in runs if run.launch.provocation == "frozen" and run is not second]
        return others[0], others[1] if len(others) > 1 else None, second
    if second.launch.compared != "resumed":
        return runs[0], second
    stopped = [run for run in runs[: runs.index(second)] if run.launch.ended == "stopped"]
    return runs[0], stopped[-1] if stopped else runs[0], second


def apply(check: Check, cases: Sequence[tuple[Any, ...]], diagnosis: Diagnosis) -> list[Finding]:
    """Return what a check finds, and note in the diagnosis how far it could judge."""
    reasons: list[CannotJudge] = []
    found: list[Finding] = []
    judged, looked_at = False, ""
    as_it_is = True
    """whether the ordinary run could be judged; a provoked one, without workers for example, is another training"""
    for case in cases:
        if check.name in case[-1].launch.refuted:
            judged, looked_at = True, case[-1].launch.refuted_by.get(check.name, "whole passes")
            continue
        try:
            new = check.findings(*case)
        except CannotJudge as reason:
            reasons.append(reason)
            as_it_is = as_it_is and bool(case[-1].launch.name)
        except Exception as error:  # a fault of the doctor must not hide what the other checks find
            diagnosis.broken[check.name] = repr(error)
        else:
            launch = case[-1].launch
            kinds: tuple[str, ...]
            kinds = (FAULT, NOTE) if launch.compared else (FAULT,) if launch.name else (FAULT, NOTE, COST)
            if launch.ended in ("hang", "lost"):  # the times are those of waiting
                kinds = tuple(kind for kind in kinds if kind != COST)
            shown = [as_confirmed(finding, launch) for finding in new if finding.kind in kinds]
            if launch.provocation == "skip":
                shown = [] if found else as_skipped(shown, case[-1])  # what other runs show follows from no skip
            found += shown
            if new and not shown:  # what such a run may not accuse, it cannot call fine either
                reasons.append(CannotJudge("it was seen in a run that is not the ordinary one"))
                continue
            if not judged:  # the evidence of the first run that could be judged
                looked_at = ", ".join(Observed.now) + (f"; {launch.name}" if launch.name else "")
            judged = True
    if judged and as_it_is and not found:
        diagnosis.fine[check.title] = looked_at
    elif reasons and not found:
        why = next((one for one in reasons if not isinstance(one, NotUsed)), reasons[0])
        where = diagnosis.unused if isinstance(why, NotUsed) else diagnosis.unjudged
        where[check.title] = str(why)
    return found


def once(findings: Iterable[Finding]) -> list[Finding]:
    """Leave out findings that an earlier run has shown already."""
    shown_by: dict[tuple[str, str], str] = {}
    return [
        finding for finding in findings if shown_by.setdefault((finding.check, finding.at), finding.run) == finding.run
    ]


def as_confirmed(finding: Finding, launch: Launch) -> Finding:
    """Return a finding; as a NOTE if it could come from cut passes, and whole ones took too long."""
    if finding.check == "validation_counts" and launch.provocation == "uneven" and finding.kind == FAULT:
        return replace(finding, kind=NOTE, text=f"{finding.text}, because the ranks cannot share this number evenly")
    if finding.check == "stream_repeats" and launch.provocation == "workers" and finding.kind == FAULT:
        return replace(finding, kind=NOTE, text=f"{finding.text}, if its loader has workers")
    if finding.check in launch.unconfirmed and finding.kind == FAULT:
        text = f"{finding.text} (the passes were cut, and whole ones did not end in time: see --full)"
        return replace(finding, kind=NOTE, text=text)
    return finding


def as_skipped(findings: list[Finding], run: Run) -> list[Finding]:
    """Return the faults of a run in which one rank skipped a batch as NOTEs of the condition for that.

    The doctor does not know whether a batch of the user's ever fulfils it, and whether on one rank alone.
    """
    taken = next((e for rank in run.ranks for e in rank.all("branch_taken")), None)
    if taken is None:
        return []
    fix = "let all ranks decide alike (all_reduce the condition), or take part in the step with a loss of zero"
    begins = "where this holds for a batch of one rank alone, the rank leaves out what the others do"
    return [
        replace(finding, kind=NOTE, at=taken["at"], text=f"{begins}: {finding.text}", fix=fix)
        for finding in findings[:1]
    ]


def counted(findings: Iterable[Finding]) -> list[Finding]:
    """Return equal findings once, with their number."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = finding.check, finding.kind, finding.at, finding.text, finding.run
        if key in found:
            found[key].count += 1
        else:
            found[key] = finding
    return list(found.values())


def with_causes(findings: list[Finding]) -> list[Finding]:
    """Put each finding under its first cause, if that was found in the same run; sort the rest by kind."""
    after = {check.name: check.after for check in CHECKS}

    def cause_of(finding: Finding) -> Finding | None:
        earlier = [f for f in findings if f.check in after.get(finding.check, ()) and f.run == finding.run]
        return next((f for f in earlier if f.kind != COST and f is not finding), None)

    rest = []
    for finding in findings:
        first = finding
        while cause := cause_of(first):
            first = cause
        if first is finding:
            rest.append(finding)
        else:
            first.consequences.append(finding)
    return sorted(rest, key=lambda finding: (FAULT, NOTE, COST).index(finding.kind))
