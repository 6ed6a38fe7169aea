"""What is tested on GPUs, tests/gpu, passes on two null GPUs with values; the tests of several ranks also on one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from cases import REPOSITORY, environment, null_gpu

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.thorough, pytest.mark.rehearsal]

FOLDER = REPOSITORY / "tests/gpu"
RANKS = FOLDER / "test_ranks_on_gpu.py"


def names_in(file: Path) -> list[str]:
    """Return the tests of a file, as pytest calls them."""
    names = [getattr(one, "name", "") for one in ast.parse(file.read_text()).body]
    return [f"{file}::{name}" for name in names if name.startswith("test_")]


TESTS = [test for file in sorted(FOLDER.glob("test_*.py")) for test in names_in(file)]
PARTS = 5
"""that are run on their own, so that several workers share them"""
POSSIBLE = "not dali and not opens_no_other_gpu"
"""DALI has the CUDA runtime linked into it, so it does not see null GPUs; their NVML sees no other processes"""


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_tested_on_gpus_passes_on_null_gpus(part: int) -> None:
    run_on_null_gpus(2, TESTS[part::PARTS])


@pytest.mark.parametrize("test", names_in(RANKS)[:2], ids=["learn", "stop"])
def test_what_several_ranks_do_passes_on_one_null_gpu(test: str) -> None:
    """The other tests of this file let the ranks share one of two GPUs as well."""
    run_on_null_gpus(1, [test])


def run_on_null_gpus(gpus: int, tests: list[str]) -> None:
    """Run these tests."""
    pytest_words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", POSSIBLE, *tests]
    words = null_gpu("--gpus", str(gpus), "--values", sys.executable, *pytest_words)
    more = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
