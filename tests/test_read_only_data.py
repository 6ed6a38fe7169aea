"""Fifty learners share one read-only data folder: training and measuring change nothing in it, not even for a moment.

Tests may run as root, which can write into read-only folders. So the files are compared, and the times of the folders
show files that were there only for a while.
"""

import shutil
from pathlib import Path

import pytest

from conftest import Script
from sources import pack

pytestmark = pytest.mark.slow

UNET = "--config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml --limit_train 16 --limit_val 4 --epochs 1"
FEW = "--limit_train 320 --limit_val 64"
RUNS = {
    "map": f"01_single_gpu/train.py {FEW} --trace true --monitor true",
    "shards": f"01_single_gpu/train.py {FEW} --loader shards",
    "memory": f"01_single_gpu/train.py {FEW} --loader memory --batch_size 8 --benchmark true --benchmark_seconds 0.1",
    "device": f"01_single_gpu/train.py {FEW} --loader device --dataset cifar10 --model cifar_cnn",
    "dali": f"01_single_gpu/train.py {FEW} --loader dali",
    "volumes": f"04_mixed_precision/train.py {UNET} --loader map",
    "volumes, dali": f"04_mixed_precision/train.py {UNET} --loader dali",
}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Length and time of last change of all files and folders."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


@pytest.fixture(scope="module")
def shared(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only data folder with everything, shards included."""
    folder = tmp_path_factory.mktemp("shared") / "data"
    shutil.copytree(data_dir, folder)
    pack("mnist", folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


@pytest.mark.parametrize("command", RUNS.values(), ids=RUNS.keys())
def test_nothing_writes_into_the_data_folder(shared: Path, run_script: Script, command: str) -> None:
    before = snapshot(shared)
    script, *arguments = command.split()
    result = run_script(script, *arguments, WORKSHOP_DATA=str(shared))
    assert result.status == 0, result.stderr
    assert snapshot(shared) == before
