"""What the job files of lesson 03 make of the GPUs and CPUs they were granted; srun only tells what it was given."""

import os
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY

EVERY_GRANT = """
scontrol() { echo first; }
srun() {
    until [[ $1 == --num_workers ]]; do shift; done
    echo "$SLURM_GPUS_ON_NODE $SLURM_CPUS_PER_TASK ${RANKS-} $OMP_NUM_THREADS $2"
}
for SLURM_GPUS_ON_NODE in "" 0 1 2 8; do
    for SLURM_CPUS_PER_TASK in {1..16}; do source "$1"; done
done
"""


def granted_and_given(job: str, folder: Path) -> list[list[int]]:
    """GPUs and CPUs that were granted; then ranks, threads and loader processes that srun was told to start."""
    for file, text in {"slurm/setup.sh": "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", "lesson/train.py": ""}.items():
        (folder / file).parent.mkdir()
        (folder / file).write_text(text)
    command = ["bash", "-c", EVERY_GRANT, "-", REPOSITORY / job]
    result = subprocess.run(command, cwd=folder / "lesson", capture_output=True, text=True)
    assert result.stderr == ""
    lines = [line.split(" ") for line in result.stdout.splitlines()]
    assert len(lines) == 5 * 16
    return [[int(word or 0) for word in line] for line in lines]


def test_torchrun_starts_a_rank_per_gpu_with_a_thread_at_least(tmp_path: Path) -> None:
    for gpus, cpus, ranks, threads, workers in granted_and_given("03_ddp/torchrun.slurm", tmp_path):
        assert ranks == max(gpus, 1)
        assert threads == workers == max(cpus // ranks, 1)


@pytest.mark.parametrize("job", ["03_ddp/job.slurm", "04_mixed_precision/job.slurm"])
def test_each_task_of_srun_has_the_cpus_of_a_task(tmp_path: Path, job: str) -> None:
    for _, cpus, _, threads, workers in granted_and_given(job, tmp_path):
        assert threads == workers == cpus


@pytest.mark.parametrize(("status", "requeued"), [(138, "requeue 7\n"), (1, ""), (0, "")])
def test_a_job_that_usr1_ends_before_python_heeds_it_is_requeued(tmp_path: Path, status: int, requeued: str) -> None:
    (tmp_path / "lesson").mkdir()
    (tmp_path / "lesson" / "train.py").touch()
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").touch()
    script = f'scontrol() {{ echo "$@"; }}; source {REPOSITORY}/slurm/setup.sh >/dev/null; (exit {status})'
    environment = os.environ | {"SLURM_JOB_ID": "7"}
    command = ["bash", "-c", script]
    result = subprocess.run(command, cwd=tmp_path / "lesson", env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (status, requeued)


@pytest.mark.parametrize(("number", "status"), [("USR1", 138), ("TERM", 1)])
def test_a_torchrun_that_usr1_ends_is_one_that_setup_requeues(tmp_path: Path, number: str, status: int) -> None:
    for file, text in {
        "slurm/setup.sh": "SLURM_CPUS_PER_TASK=1 SLURM_GPUS_ON_NODE=0",
        "lesson/torchrun": f"#!/bin/bash\nkill -{number} $PPID\nexit 1\n",
    }.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    (tmp_path / "lesson" / "torchrun").chmod(0o755)
    script = f'scontrol() {{ echo first; }}; srun() {{ "${{@:2}}"; }}; source {REPOSITORY}/03_ddp/torchrun.slurm'
    environment = os.environ | {"PATH": f"{tmp_path}/lesson:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path / "lesson", env=environment)
    assert result.returncode == status
