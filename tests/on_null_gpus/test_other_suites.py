"""The study of other libraries' GPU tests counts what passes, and where."""

import sys
from pathlib import Path

import pytest

from lab.studies import other_suites

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.slow]
TESTS = """
import os, pytest, torch
gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@gpus
def test_on_two_gpus(): assert (torch.ones(2, device="cuda:1") + 1).tolist() == [2, 2]
@gpus
def test_wrong_on_gpus(): raise ValueError("in /home/someone/file.py at 0x7f00")
def test_anywhere(): pass
def test_wrong_anywhere(): assert False
def test_nowhere(): pytest.skip("needs a TPU")
"""
ENDS = "import os\ndef test_ends(): os._exit(3)\n"


def test_a_suite_is_counted_on_the_cpu_and_on_null_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_ends.py").write_text(ENDS)
    suite = other_suites.Suite("library", "1.0", ("test_it.py", "test_ends.py"))
    found = {}
    for where in ("cpu", "null"):
        runs = [
            other_suites.run_file(
                suite, file, tmp_path, Path(sys.executable), where == "null", tmp_path / f"{where}.xml"
            )
            for file in suite.files
        ]
        found[where] = other_suites.merged(runs)
    row = dict(zip(other_suites.COLUMNS, other_suites.row_of(suite, found), strict=True))
    assert row == {
        "library": "library",
        "version": "1.0",
        "tests": 5,
        "passed on the CPU alone": 1,
        "skipped there": 2,
        "passed on null GPUs": 2,
        "failed on null GPUs": 3,
        "of these also on the CPU": 2,
        "why the others failed": "ValueError: in .../file.py at 0x... (1)",
    }
