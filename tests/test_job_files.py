"""What the job files start, and what they make of the GPUs and CPUs they were granted; srun and nsys are emulated."""

import os
import subprocess
from collections.abc import Callable
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
    """GPUs and CPUs that were granted; then ranks, threads and loader processes that srun was asked to start."""
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


@pytest.mark.parametrize("job", ["03_ddp/job.slurm", "04_mixed_precision/job.slurm", "05_fully_sharded/job.slurm"])
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


OF_SRUN = ["03_ddp/job", "04_mixed_precision/job", "05_fully_sharded/job"]
"""job files whose ranks srun starts"""
JOBS = ["01_single_gpu/job", "02_dataparallel/job", "03_ddp/torchrun", *OF_SRUN]
EVERY_TASK = """
SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=2 SLURM_GPUS_ON_NODE=2 SLURM_NNODES=1 SLURM_NODEID=0
export ${!SLURM_*}
scontrol() { echo first; }
srun() {
    while [[ $1 == --* ]]; do shift; done
    for task in $TASKS; do SLURM_PROCID=$task "$@"; done
}
source "$1" --epochs 3
"""
PROGRAMS = {
    "kernprof": 'echo "$SLURM_PROCID kernprof $*"',
    "python": 'echo "$RANK python $*"',
    "nsys": 'echo "$SLURM_PROCID$RANK nsys $*"; until [[ $1 == -o ]]; do shift; done; exec "${@:3}"',
    "torchrun": """
        for flag; do
            shift
            [[ $flag == --signals-to-handle ]] && shift && break
        done
        [[ $1 == --no-python ]] && shift || set -- python "$@"
        for RANK in 0 1; do env -u SLURM_PROCID RANK=$RANK "$@"; done
    """,
}


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a job file with programs that only print how they are started; returns a line for each start."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "setup.sh").touch()
    (tmp_path / "lesson").mkdir()
    (tmp_path / "programs").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "programs" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "programs" / name).chmod(0o755)

    def start(job: str, **variables: str) -> list[str]:
        tasks = "0 1" if job in OF_SRUN else "0"
        environment = {name: value for name, value in os.environ.items() if name not in ("NSYS", "SCRIPT", "RANK")}
        environment |= {"PATH": f"{tmp_path}/programs:{os.environ['PATH']}", "TASKS": tasks} | variables
        command = ["bash", "-c", EVERY_TASK, "-", REPOSITORY / f"{job}.slurm"]
        result = subprocess.run(command, cwd=tmp_path / "lesson", env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.splitlines()

    return start


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("script", ["train.py", "mine.py"])
def test_nsys_writes_a_file_for_each_rank(started: Callable, job: str, script: str) -> None:
    variables = {} if script == "train.py" else {"SCRIPT": script}
    lines = started(job, NSYS="1", **variables)
    recorders = [line for line in lines if " nsys profile " in line]
    assert [line for line in lines if " python " in line and line not in recorders]
    several = job.startswith(("03", "04", "05"))
    assert len(recorders) == (2 if several else 1)
    for rank, line in enumerate(recorders):
        assert line.startswith(f"{rank} ")
        assert "--capture-range=cudaProfilerApi" in line and "--force-overwrite=true" in line
        report = line.partition(" -o ")[2].split()[0]
        name = "RANK" if job.endswith("torchrun") else "SLURM_PROCID"
        assert report == (f"7_rank%q{{{name}}}" if several else "7")  # nsys replaces %q{NAME} by that variable
        assert f" python {script} --num_workers " in line
        assert line.endswith(" --resume true --trace true --epochs 3")


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("script", ["train.py", "mine.py"])
def test_without_nsys_each_rank_has_a_line_profile(started: Callable, job: str, script: str) -> None:
    variables = {} if script == "train.py" else {"SCRIPT": script}
    lines = started(job, **variables)
    program = "python" if job.endswith("torchrun") else "kernprof"
    assert len(lines) == (2 if job.startswith(("03", "04", "05")) else 1)
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} {program} ")
        assert f"{script} --num_workers " in line and line.endswith(" --resume true --epochs 3")
    if program == "kernprof":
        reports = {line.partition(" -o ")[2].split()[0] for line in lines}
        assert len(reports) == len(lines)
