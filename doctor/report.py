"""The report: what was found, what is fine, what could not be judged."""

import os
from collections.abc import Iterator
from pathlib import Path

from .checks import COST, FAULT, NOTE, Diagnosis, Finding
from .events import Run


def place(at: str) -> str:
    """Return file:line as seen from the present folder, if it lies there."""
    file, _, line = at.rpartition(":")
    if not file:
        return at
    near = os.path.relpath(file)
    return f"{near if not near.startswith('..') else file}:{line}"


def lines_of(finding: Finding, indent: str = "") -> Iterator[str]:
    """Yield the lines of a finding and its consequences."""
    where = f" [{finding.run}]" if finding.run else ""
    yield f"{indent}{finding.kind}  {place(finding.at)}{where}"
    yield f"{indent}       {finding.text}."
    yield f"{indent}       Fix: {finding.fix}."
    if finding.exercise:
        yield f"{indent}       Exercise: {finding.exercise}"
    for consequence in finding.consequences:
        yield f"{indent}       and so: {consequence.text} ({place(consequence.at)})."


def text(runs: list[Run], diagnosis: Diagnosis) -> str:
    """Return the report as text."""
    lines = [*heading(runs)]
    for finding in diagnosis.findings:
        lines += ["", *lines_of(finding)]
    if diagnosis.fine:
        lines += ["", f"Looked at, and fine ({len(diagnosis.fine)}):", *(f"  {title}" for title in diagnosis.fine)]
    if diagnosis.unjudged:
        lines += ["", f"Could not be judged ({len(diagnosis.unjudged)}):"]
        lines += [f"  {title} -- {reason}" for title, reason in diagnosis.unjudged.items()]
    return "\n".join(lines)


def heading(runs: list[Run]) -> Iterator[str]:
    """Yield what was run, and how it ended."""
    for run in runs:
        launch = run.launch
        updates = len(run.first.all("update")) if run.ranks else 0
        yield (f"{Path(launch.script).name} on {run.world} rank(s){', ' + launch.name if launch.name else ''}: "
               f"{updates} updates in {launch.seconds:.0f} s; {launch.ended}")  # fmt: skip
