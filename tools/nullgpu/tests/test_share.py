"""A process may see any share of the GPUs of a machine, as Slurm and CUDA_VISIBLE_DEVICES choose it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Run

SCRIPT = Path(__file__).resolve().parent / "share.py"
UUID = "GPU-4e{:02x}0000-0000-0000-0000-000000000000"
SHARES = {
    "all": [0, 1, 2, 3],  # the variable is not set
    "1": [1],
    "2,3": [2, 3],
    "0,1": [0, 1],
    "3,0,1": [3, 0, 1],
    " 1, 2": [1, 2],
    ",".join(map(UUID.format, (2, 0))): [2, 0],
    "GPU-4e03,GPU-4e00": [3, 0],  # beginnings
    "1,7,2": [1],  # an entry that names no GPU ends the list
    "2,-1,3": [2],
    "0,x,1": [0],
    f"{UUID.format(1)},GPU-4e,{UUID.format(2)}": [1],  # the beginning of all
    "1,1": [],
    "": [],
    "-1": [],
    "NoDevFiles": [],
}
"""for values of CUDA_VISIBLE_DEVICES, the GPUs that a process sees of a machine with four"""


def check(found: dict[str, Any], gpus: list[int]) -> None:
    """Fail unless a process has seen these GPUs by CUDA, and the whole machine by NVML."""
    assert (found["before"], found["count"], found["available"]) == (len(gpus), len(gpus), bool(gpus))
    assert found["machine"] == 4
    assert (found["index"], found["bus"]) == (gpus, [gpu + 1 for gpu in gpus])
    assert found["used"] == [gpus.index(gpu) + 1 if gpu in gpus else 0 for gpu in range(4)]
    assert found["value"] == [4.0] * len(gpus)
    assert found["utilization"] == [0] * len(gpus)


@pytest.fixture(scope="module")
def forks(nullgpu: Run) -> dict[str, dict[str, Any]]:
    """For each share, what a process sees that sets the variable after importing torch."""
    done = nullgpu("--gpus", 4, "--values", sys.executable, SCRIPT, *SHARES)
    return dict(zip(SHARES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("visible", SHARES)
def test_a_process_sees_the_share_that_it_chooses_itself(visible: str, forks: dict[str, dict[str, Any]]) -> None:
    check(forks[visible], SHARES[visible])


@pytest.mark.slow
@pytest.mark.parametrize(
    "visible", [pytest.param(one, marks=[] if one in ("2,3", "") else [pytest.mark.thorough]) for one in SHARES]
)
def test_a_process_sees_the_share_that_it_was_given(visible: str, nullgpu: Run) -> None:
    given = [] if visible == "all" else ["env", f"CUDA_VISIBLE_DEVICES={visible}"]
    done = nullgpu("--gpus", 4, "--values", *given, sys.executable, SCRIPT)
    assert done.status == 0, done.stderr[-3000:]
    check(json.loads(done.stdout), SHARES[visible])


@pytest.mark.slow
def test_a_process_that_was_given_no_gpu_may_take_some(nullgpu: Run) -> None:
    done = nullgpu("--gpus", 4, "--values", "env", "CUDA_VISIBLE_DEVICES=", sys.executable, SCRIPT, "2,3")
    check(json.loads(done.stdout), [2, 3])


@pytest.mark.slow
def test_ranks_with_one_gpu_each_exchange_data(tmp_path: Path, nullgpu: Run) -> None:
    """As `srun --gpus-per-task=1` starts them: each rank sees one GPU, which is its number 0."""
    rank = tmp_path / "rank.sh"
    rank.write_text(f'CUDA_VISIBLE_DEVICES=$((LOCAL_RANK + 1)) exec "{sys.executable}" "{SCRIPT}" > "$1/$RANK"\n')
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = nullgpu("--gpus", 4, "--values", "python", *launch, "sh", rank, tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / str(number)).read_text()) for number in range(2)]
    assert [(one["count"], one["index"], one["sum"]) for one in found] == [(1, [1], 3.0), (1, [2], 3.0)]
