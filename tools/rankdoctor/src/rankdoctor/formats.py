"""Findings for other programs: annotations of GitHub's, and SARIF 2.1.0, which code hosts and editors show.

GitHub: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
SARIF: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import json
import os
from collections.abc import Iterator

from .checks import CHECKS, Diagnosis, Finding
from .checks.asked import ASKED

GITHUB = {"FAULT": "error", "NOTE": "warning", "COST": "notice"}
SARIF = {"FAULT": "error", "NOTE": "warning", "COST": "note"}


def place_of(finding: Finding) -> tuple[str, int]:
    """Return the file, as seen from the present folder, and the line; line 1 if it is not known."""
    file, _, line = finding.at.rpartition(":")
    return os.path.relpath(file) if file else "", int(line) if line.isdecimal() else 1


def said(finding: Finding) -> str:
    """Return what was found, its fix, and what follows from it."""
    more = "".join(f" What follows from it: {other.text}." for other in finding.consequences)
    return f"{finding.text}. Fix: {finding.fix}.{more}"


def github(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line for each finding, which GitHub shows at the line of the script."""

    def escaped(text: str, *more: str) -> str:
        for character in ("%", "\r", "\n", *more):
            text = text.replace(character, f"%{ord(character):02X}")
        return text

    for finding in diagnosis.findings:
        file, line = place_of(finding)
        where = f"file={escaped(file, ':', ',')},line={line},title=rankdoctor {finding.check}"
        yield f"::{GITHUB[finding.kind]} {where}::{escaped(said(finding))}"


def sarif(diagnosis: Diagnosis) -> str:
    """Return all findings as one SARIF log."""
    rules = [{"id": check.name, "shortDescription": {"text": check.title}} for check in (*CHECKS, *ASKED)]
    found = []
    for finding in diagnosis.findings:
        file, line = place_of(finding)
        location = {"artifactLocation": {"uri": file.replace(os.sep, "/")}, "region": {"startLine": line}}
        found.append(
            {
                "ruleId": finding.check,
                "level": SARIF[finding.kind],
                "message": {"text": said(finding)},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {"name": "rankdoctor", "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": found}],
    }
    return json.dumps(log, indent=1)
