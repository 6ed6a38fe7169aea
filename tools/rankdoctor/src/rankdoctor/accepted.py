"""Findings that the user has accepted: by a comment in the line, or because they are in a baseline.

dist.all_reduce(done)  # rankdoctor: ignore[same_collectives]
"""

import json
import linecache
import re
from dataclasses import dataclass, field
from pathlib import Path

from .checks import CHECKS, Diagnosis, Finding
from .checks.asked import ASKED
from .checks.comparisons import COMPARISONS

FORMAT = 1
"""of a baseline; another number cannot be compared"""
COMMENT = re.compile(r"#\s*rankdoctor:\s*ignore\[([\w\s,]*)\]")
NAMES = {check.name for check in (*CHECKS, *ASKED)} | set(COMPARISONS)


class BaselineError(ValueError):
    """A baseline that cannot be used; the message says why."""


@dataclass
class Accepted:
    """What was left out of a diagnosis."""

    by_comment: int = 0
    by_baseline: int = 0
    unknown: list[str] = field(default_factory=list)
    """lines with a comment that names no check"""


def without_numbers(text: str) -> str:
    """Return a text in which all numbers are N: they can differ between two runs of the same script."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text)


def key_of(finding: Finding, root: str) -> list[str]:
    """Return the key of a finding: the check, the file, the text of the line, and the text of the finding."""
    file, _, line = finding.at.rpartition(":")
    code = linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
    near = str(Path(file).relative_to(root)) if file and Path(file).is_relative_to(root) else file
    return [finding.check, near, code, without_numbers(finding.text)]


def accept(diagnosis: Diagnosis, root: str, baseline: str = "") -> Accepted:
    """Take out of a diagnosis what is accepted; write the baseline if there is no such file yet.

    Raises BaselineError: the file is no baseline, or one of another version of the doctor.
    """
    found = Accepted()
    kept = []
    for finding in diagnosis.findings:
        file, _, line = finding.at.rpartition(":")
        comment = COMMENT.search(linecache.getline(file, int(line))) if line.isdecimal() else None
        names = {name.strip() for name in comment[1].split(",")} if comment else set()
        found.unknown += [f"{finding.at} names {name}" for name in sorted(names - NAMES)]
        if finding.check in names:
            found.by_comment += 1
        else:
            kept.append(finding)
    if baseline and not Path(baseline).exists():
        content = {"format": FORMAT, "findings": [key_of(finding, root) for finding in kept]}
        Path(baseline).write_text(json.dumps(content, indent=1) + "\n")
    if baseline:
        known = read_baseline(Path(baseline))
        found.by_baseline = sum(key_of(finding, root) in known for finding in kept)
        kept = [finding for finding in kept if key_of(finding, root) not in known]
    diagnosis.findings = kept
    return found


def read_baseline(file: Path) -> list[list[str]]:
    """Return the keys of the findings in a baseline."""
    try:
        content = json.loads(file.read_text())
        number, findings = content["format"], content["findings"]
    except (ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{file} is no baseline: {error!r}") from None
    if number != FORMAT:
        raise BaselineError(f"{file} was written by another version of the doctor: delete it, and run again")
    return findings
