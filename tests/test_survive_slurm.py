"""Runs under a real Slurm that survive being requeued, and their own time limit."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, Script
from ranks import start_ranks
from slurm_cluster import SlurmCluster
from test_survive import assert_equal, results_of, state_of

pytestmark = pytest.mark.slurm

SHORT = ["--limit_train", 800, "--limit_val", 16, "--batch_size", 8, "--epochs", 2, "--loader", "memory"]
SLOW = "run.end_step(loss); time.sleep(0 if __import__('os').environ.get('SLURM_RESTART_COUNT') else 0.5)"


@dataclass
class Job:
    """A lesson as a job of several lives, the first of which is slow enough to be interrupted."""

    slurm: SlurmCluster
    lesson: Path
    number: int

    @property
    def log(self) -> str:
        file = self.lesson / f"{self.number}.log"
        return file.read_text() if file.exists() else ""

    def wait_for(self, text: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < end, f"no {text!r} in the log after {seconds} s:\n{self.log}"
            time.sleep(0.2)

    def stopped_and_resumed(self) -> str:
        """Wait for its end; return the signal that stopped it at the step from which it later continued."""
        assert self.slurm.wait(self.number) == "COMPLETED", self.log
        assert self.slurm.job(self.number)["Restarts"] == "1", self.log
        ((name, where),) = re.findall(r"stopped by (\w+): saved (after (?:step \d+ of )?epoch \d);", self.log)
        assert len(re.findall(f"resumed from .*/checkpoint.pt {where}$", self.log, re.MULTILINE)) == 1
        assert len(re.findall("^epoch 1  train loss", self.log, re.MULTILINE)) == 1
        assert len(re.findall("^epoch 2  train loss", self.log, re.MULTILINE)) == 1
        steps = re.findall(r"^epoch (\d)  step +(\d+)/", self.log, re.MULTILINE)
        assert len(steps) == len(set(steps))
        return name


@pytest.fixture(scope="module")
def submit(slurm: SlurmCluster, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> partial:
    def submit(script: str, *options: str, threads: int = 1) -> Job:
        copy = tmp_path_factory.mktemp("jobs")
        shutil.copytree(REPOSITORY / "slurm", copy / "slurm")
        lesson = copy / script.partition("/")[0]
        shutil.copytree(REPOSITORY / lesson.name, lesson)
        train = (lesson / "train.py").read_text()
        assert train.count("run.end_step(loss)") == 1
        (lesson / "train.py").write_text(train.replace("run.end_step(loss)", SLOW))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the copy has no .venv of its own
        folders = f"WORKSHOP_DATA={data_dir},WORKSHOP_RUNS={copy}/runs,PYTHONPATH={REPOSITORY}"
        environment = f"--export=ALL,PATH={path},{folders}"
        flags = [*map(str, SHORT), "--log_interval", "1"]
        number = slurm.submit(environment, *options, f"--cpus-per-task={threads}", "job.slurm", *flags, cwd=lesson)
        return Job(slurm, lesson, number)

    return submit


@pytest.fixture(scope="module")
def limited_job(submit: partial) -> Job:
    """A job that has one minute and needs two; Slurm sends the signal 0 to 30 seconds before it must."""
    return submit("01_single_gpu/job.slurm", "--time=1", "--signal=USR1@1")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_requeued_job_continues_as_one_run(
    submit: partial, limited_job: Job, user_environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit("03_ddp/job.slurm")  # while the other one waits for the end of its time
    job.wait_for("epoch 1  step  3/")
    job.slurm.run("scontrol", "requeue", str(job.number))
    flags = ["--num_workers", 1, "--run_dir", tmp_path]
    whole = start_ranks(2, "train.py", *SHORT, *flags, cwd=REPOSITORY / "03_ddp", environment=user_environment)
    assert [rank.status for rank in whole] == [0, 0]
    assert job.stopped_and_resumed() == "SIGTERM"
    compare(job, tmp_path)


def test_a_job_requeues_itself_before_its_time_limit(
    limited_job: Job, run_script: Script, one_thread: None, tmp_path: Path
) -> None:
    assert run_script("01_single_gpu/train.py", *SHORT, "--run_dir", tmp_path).status == 0
    assert limited_job.stopped_and_resumed() == "SIGUSR1"
    compare(limited_job, tmp_path)


def compare(job: Job, whole: Path) -> None:
    """The job's run must have ended as one that was never interrupted."""
    (folder,) = (job.lesson.parent / "runs").glob("*/*")
    for part in ("model", "optimizer", "scheduler"):
        assert_equal(state_of(folder)[part], state_of(whole)[part])
    assert results_of(folder) == results_of(whole)
