"""The tests are a user outside of any job, on a machine without GPUs, whatever they themselves run in."""

import os
from pathlib import Path

import pytest

from asked_runs import Doctor

for name in [name for name in os.environ if name.startswith("SLURM")]:
    del os.environ[name]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # several processes share the cores


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """The doctor, with copies of the scripts in a new folder."""
    return Doctor(tmp_path)
