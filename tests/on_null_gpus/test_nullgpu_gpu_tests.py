"""What is tested on GPUs, tests/gpu, passes on two null GPUs with values."""

import ast
import subprocess
import sys

import pytest
from cases import REPOSITORY, environment, null_gpu

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.thorough]

FILE = REPOSITORY / "tests/gpu/test_on_gpu.py"
NAMES = [one.name for one in ast.parse(FILE.read_text()).body if getattr(one, "name", "").startswith("test_")]
PARTS = 5
"""that are run on their own, so that several workers share them"""
POSSIBLE = "not dali and not opens_no_other_gpu"
"""DALI has the CUDA runtime linked into it, so it does not see null GPUs; their NVML sees no other processes"""


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_tested_on_gpus_passes_on_null_gpus(part: int) -> None:
    chosen = [f"{FILE}::{name}" for name in NAMES[part::PARTS]]
    pytest_words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", POSSIBLE, *chosen]
    words = null_gpu("--gpus", "2", "--values", sys.executable, *pytest_words)
    more = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
