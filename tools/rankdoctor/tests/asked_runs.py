"""Run the doctor on copies of the scripts, for the tests of checks that are asked for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
DOCTOR = [sys.executable, "-m", "rankdoctor"]


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of the doctor."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, folder)
    done = subprocess.run([*DOCTOR, *arguments], cwd=folder, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout, done.stderr


def findings(folder: Path, *arguments: str) -> tuple[dict, dict[str, tuple[str, str, str]]]:
    """Return the report, and of each check that found something: the kind, the mark of the line, and the text."""
    _, out, err = run(folder, "--json", *arguments)
    assert not err
    report = json.loads(out)
    assert not report["broken"] and not report["errors"]
    found = {}
    for finding in report["findings"]:
        file, _, line = finding["at"].rpartition(":")
        mark = Path(file).read_text().splitlines()[int(line) - 1].rpartition("# LINE ")[2].strip()
        found[finding["check"]] = finding["kind"], mark, finding["text"]
    return report, found
