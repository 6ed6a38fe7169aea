"""The doctor's page: all checks are on it, its report is what the doctor prints; drafts of issues show the fault."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.checks import CHECKS
from doctor.checks.runs import COMPARISONS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "doctor/README.md").read_text()
DRAFTS = re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", (REPOSITORY / "docs/upstream.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("check", [*CHECKS, *COMPARISONS.values()], ids=lambda check: check.name)
def test_each_check_is_on_the_page_with_its_exercise(check) -> None:  # noqa: ANN001
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {check.title} |")]
    assert f"](../{check.exercise}/README.md)" in row if check.exercise else row.endswith("|  |")
    assert not check.exercise or (REPOSITORY / check.exercise / "README.md").is_file()


def findings(report: str) -> list[str]:
    """Return kind, line and text of each finding; numbers in texts follow from random numbers, and become N."""
    found = re.findall(r"^(FAULT|NOTE|COST) +(\S+)\n +(.*)\n", report, re.M)
    return [f"{kind} {at} {re.sub(r'[0-9]+', 'N', text)}" for kind, at, text in found]


def test_the_example_gives_the_report_on_the_page() -> None:
    command = [sys.executable, "doctor/run.py", "docs/doctor_example.py"]
    seen = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert seen.returncode == 1, seen.stderr
    assert findings(seen.stdout) == findings(PAGE)


@pytest.mark.parametrize(("title", "code"), DRAFTS, ids=[title for title, _ in DRAFTS])
def test_the_script_of_a_draft_shows_the_fault(title: str, code: str) -> None:
    exec(code, {})
