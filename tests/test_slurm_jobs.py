"""The lessons as jobs of a real Slurm."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm


def test_lesson_01_job(slurm: SlurmCluster, user_environment: dict[str, str], tmp_path: Path) -> None:
    lesson = REPOSITORY / "01_single_gpu"
    environment = user_environment | slurm.environment | {"SBATCH_WAIT": "1"}
    command = ["sbatch", "--parsable", "--cpus-per-task=1", "job.slurm", "--limit_train", "640", "--epochs", "2"]
    result = subprocess.run(command, cwd=lesson, env=environment, capture_output=True, text=True)
    job = result.stdout.strip()
    log, profile = lesson / f"{job}.log", lesson / f"{job}.lprof"
    try:
        assert result.returncode == 0, log.read_text()
        assert "epoch 2  train loss" in log.read_text()
        (summary,) = (tmp_path / "runs" / "01_single_gpu" / job).glob("summary.json")
        found = json.loads(summary.read_text())
        assert len(found["epochs"]) == 2
        assert found["config"]["num_workers"] == 1
        assert (found["hardware"]["cpus_available"], found["hardware"]["threads"]) == (1, 1)
        shown = subprocess.run(
            [sys.executable, "-m", "line_profiler", "-rmt", profile], cwd=lesson, capture_output=True, text=True
        ).stdout
        assert "train_one_epoch" in shown
        assert "loss.backward()" in shown
    finally:
        log.unlink(missing_ok=True)
        profile.unlink(missing_ok=True)


def submit_and_wait(
    slurm: SlurmCluster, environment: dict[str, str], lesson: Path, *arguments: str
) -> tuple[int, int, str]:
    """Run ``sbatch arguments`` in a lesson's folder; return its status, the job id, and the log. Files are removed."""
    environment = environment | slurm.environment | {"SBATCH_WAIT": "1"}
    command = ["sbatch", "--parsable", *arguments]
    result = subprocess.run(command, cwd=lesson, env=environment, capture_output=True, text=True, timeout=300)
    job = int(result.stdout)
    log = (lesson / f"{job}.log").read_text()
    for pattern in (f"{job}.log", f"{job}_*.lprof"):
        for file in lesson.glob(pattern):
            log += f"\n{file.name}"
            file.unlink()
    return result.returncode, job, log


SHORT = ["--limit_train", "640", "--limit_val", "101", "--loader", "memory"]


RANKS = [("03_ddp", "job.slurm"), ("03_ddp", "torchrun.slurm"), ("05_fully_sharded", "job.slurm")]
"""lessons and job files of several ranks; that of lesson 04 is the same as that of lesson 05"""

FIRST_OF_RANKS = [RANKS[0], *(pytest.param(*job, marks=pytest.mark.thorough) for job in RANKS[1:])]
"""the same, for `make test` only the first"""


def test_the_job_files_of_lessons_04_and_05_differ_in_their_names() -> None:
    fourth, fifth = ((REPOSITORY / lesson / "job.slurm") for lesson in ("04_mixed_precision", "05_fully_sharded"))
    assert fourth.read_text().replace("04_mixed_precision", "05_fully_sharded") == fifth.read_text()


@pytest.mark.parametrize(("lesson", "script"), FIRST_OF_RANKS)
def test_a_job_of_ranks_on_two_nodes(
    slurm: SlurmCluster, user_environment: dict[str, str], tmp_path: Path, lesson: str, script: str
) -> None:
    status, job, log = submit_and_wait(slurm, user_environment, REPOSITORY / lesson, "-N", "2", script, *SHORT)
    assert status == 0, log
    (summary,) = (tmp_path / "runs" / lesson).glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert summary.parent.name == str(job)
    assert (found["world_size"], found["global_batch_size"]) == (4, 256)
    assert found["hardware"]["threads"] == 2
    assert log.count("epoch 1  train loss") == 1
    profiles = re.findall(r"^\d+_rank\d\.lprof$", log, re.MULTILINE)
    assert len(profiles) == (4 if script == "job.slurm" else 0)


NSYS = """#!/bin/bash
# As nsys: writes a report, of which %q{NAME} is replaced by a variable, and runs the program.
until [[ $1 == -o ]]; do shift; done
report=$2
if [[ $report =~ (.*)%q\\{(.*)\\} ]]; then name=${BASH_REMATCH[2]}; report=${BASH_REMATCH[1]}${!name}; fi
touch "$report.nsys-rep"
exec "${@:3}"
"""


@pytest.mark.parametrize(("folder", "script"), FIRST_OF_RANKS)
def test_nsys_writes_a_report_for_each_rank(
    slurm: SlurmCluster, user_environment: dict[str, str], tmp_path: Path, folder: str, script: str
) -> None:
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    lesson = REPOSITORY / folder
    environment = user_environment | {"NSYS": "1", "PATH": f"{nsys.parent}:{user_environment['PATH']}"}
    before = set(lesson.glob("*.nsys-rep"))
    status, number, log = submit_and_wait(slurm, environment, lesson, script, *SHORT)
    written = set(lesson.glob("*.nsys-rep")) - before
    for file in written:
        file.unlink()
    assert status == 0, log
    assert sorted(file.stem for file in written) == [f"{number}_rank0", f"{number}_rank1"]
    assert ".lprof" not in log
    assert "steps" in log and "trace" in log  # --trace true was passed on
    assert "epoch 1  train loss" in log


def test_a_mistake_ends_all_ranks_of_a_job(slurm: SlurmCluster, user_environment: dict[str, str]) -> None:
    lesson = REPOSITORY / "03_ddp"
    status, _, log = submit_and_wait(slurm, user_environment, lesson, "job.slurm", "--global_batch_size", "65")
    # srun reports the highest status: 2, or that of the rank which it ended while that was still writing its profile
    assert status in (2, 128 + signal.SIGTERM), log
    assert log.count("error: --global_batch_size 65 cannot be shared evenly by 2 ranks") == 1


def test_two_nodes_without_srun(slurm: SlurmCluster, user_environment: dict[str, str]) -> None:
    lesson = REPOSITORY / "03_ddp"
    wrap = ["-N", "2", "--output=%j.log", f"--wrap={sys.executable} train.py"]
    status, _, log = submit_and_wait(slurm, user_environment, lesson, *wrap)
    assert status == 2, log
    assert "error: this job has 2 tasks, but only one was started: write srun before it in the job" in log


def test_lesson_02_job(slurm: SlurmCluster, user_environment: dict[str, str]) -> None:
    lesson = REPOSITORY / "02_dataparallel"
    status, job, log = submit_and_wait(slurm, user_environment, lesson, "--cpus-per-task=1", "job.slurm", *SHORT)
    assert status == 0, log
    assert "DataParallel does nothing here: it found 0 GPU(s)" in log
    assert f"{job}_1.lprof" in log
