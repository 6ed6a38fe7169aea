"""What the tests of this folder share: whether there can be a null GPU here, and a little of each data set.

It is a plugin and no conftest.py, because other tests import the one of the folder above by this name.
"""

import fcntl
import os
from pathlib import Path

import nullgpu
import pytest
from cases import make_data


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def null_gpus(shared_folder: Path) -> None:
    """Skip the tests where there can be no null GPU. The first worker compiles its library, and the others wait."""
    with (shared_folder / "nullgpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            nullgpu.environment()
        except nullgpu.NotPossible as reason:
            pytest.skip(str(reason))


@pytest.fixture(scope="session")
def null_data(null_gpus: None, shared_folder: Path) -> Path:
    """A little of each data set. The first worker generates it, and the others wait."""
    with (shared_folder / "nullgpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_data(shared_folder / "nullgpu_data")
    return shared_folder / "nullgpu_data"
