"""A plugin of pytest for the tests of this folder: the compiled library, and their data.

It is no conftest.py, because other tests import the one of the folder above by this name.
"""

import fcntl
import os
from pathlib import Path

import pytest
from cases import make_data

from nullgpu import build


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def null_library(shared_folder: Path) -> Path:
    """The compiled library. The first worker compiles it, and the others wait."""
    with (shared_folder / "nullgpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.library()


@pytest.fixture(scope="session")
def null_data(null_library: Path, shared_folder: Path) -> Path:
    """A little of each data set. The first worker generates it, and the others wait."""
    with (shared_folder / "nullgpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_data(shared_folder / "nullgpu_data")
    return shared_folder / "nullgpu_data"
