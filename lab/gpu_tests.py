"""Run tests/gpu, many at a time, and store what became of each test at once.

    python lab/gpu_tests.py --folder DIR

When it is called again with the same folder, tests that passed or were skipped before are left out. DIR/tests.jsonl has
a line for each test, and DIR/tests.xml the same as JUnit results; both hold all calls, also those that were cut. Needs
pytest; with pytest-xdist, half as many tests as there are CPUs run at a time, because many start a second process.
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lab.flags import Parser
from workshop.errors import UserError, run_reporting_user_errors
from workshop.hardware import available_cpus
from workshop.paths import REPOSITORY

if TYPE_CHECKING:
    import pytest

FILE = "STORED_GPU_TESTS"
"""the variable that names tests.jsonl to pytest and its workers; tests/gpu removes those that begin with WORKSHOP"""
NOTHING_TO_DO = 5
"""exit status of pytest"""
SLOW = 20.0
"""seconds; slower tests are named, because they decide how long all of them take"""
UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd]")
"""characters that XML does not have, for example those of colors"""
file_of_tests = os.environ.get(FILE)


# What pytest runs in each of its processes, with -p lab.gpu_tests.


def pytest_collection_modifyitems(config: "pytest.Config", items: "list[pytest.Item]") -> None:
    """Leave out what passed before."""
    if file_of_tests is not None:
        done = finished(read(Path(file_of_tests)))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Store what became of a test; the workers of pytest-xdist leave this to the process that started them."""
    if file_of_tests is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "failed":
            row["why"] = report.longreprtext[-3000:]
        with open(file_of_tests, "a") as file:
            file.write(json.dumps(row) + "\n")


# What measure.py runs.


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each test; the last line of the file may be cut."""
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["test"]] = row
    return found


def finished(tests: dict[str, dict[str, Any]]) -> set[str]:
    """Return the names of the tests that need not run again."""
    return {name for name, row in tests.items() if row["outcome"] != "failed"}


def write_junit(tests: dict[str, dict[str, Any]], file: Path) -> None:
    """Write the results in the format of JUnit."""
    outcomes = [row["outcome"] for row in tests.values()]
    counts = {"tests": len(outcomes), "failures": outcomes.count("failed"), "skipped": outcomes.count("skipped")}
    suite = ElementTree.Element("testsuite", {"name": "tests/gpu"} | {name: str(n) for name, n in counts.items()})
    for name, row in tests.items():
        module, _, test = name.partition("::")
        case = ElementTree.SubElement(suite, "testcase", classname=module, name=test, time=f"{row['seconds']:.3f}")
        if row["outcome"] != "passed":
            kind = {"failed": "failure", "skipped": "skipped"}[row["outcome"]]
            ElementTree.SubElement(case, kind).text = UNPRINTABLE.sub("?", row.get("why", ""))
    ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)


def main() -> None:
    """Run the tests that are left; say which failed."""
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", default="", metavar="WORDS", help="as -k of pytest")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if find_spec("pytest") is None:
        raise UserError(f"{sys.executable} has no pytest")
    workers = max(1, available_cpus() // 2)
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 and find_spec("xdist") else []
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "lab.gpu_tests", "-p", "no:cacheprovider"]
    words += [*parallel, *(["-k", arguments.only] if arguments.only else [])]
    environment = os.environ | {FILE: str(folder / "tests.jsonl")}
    process = subprocess.Popen(words, cwd=REPOSITORY, env=environment, start_new_session=True)

    def interrupt(number: int, frame: FrameType | None) -> None:
        os.killpg(process.pid, signal.SIGKILL)  # what is done is stored
        write_junit(read(folder / "tests.jsonl"), folder / "tests.xml")
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    status = process.wait()
    tests = read(folder / "tests.jsonl")
    write_junit(tests, folder / "tests.xml")
    failed = [name for name, row in tests.items() if row["outcome"] == "failed"]
    slow = [(row["seconds"], name) for name, row in tests.items() if row["seconds"] > SLOW]
    for name in failed:
        print(f"note: failed: {name}")
    for seconds, name in sorted(slow, reverse=True):
        print(f"note: slow: {seconds:.0f} s: {name}")
    skipped = sum(row["outcome"] == "skipped" for row in tests.values())
    print(f"note: {len(tests) - skipped - len(failed)} passed, {skipped} skipped, {len(failed)} failed")
    if status not in (0, 1, NOTHING_TO_DO):
        raise UserError(f"pytest ended with status {status}: not all tests ran")


if __name__ == "__main__":
    run_reporting_user_errors(main)
