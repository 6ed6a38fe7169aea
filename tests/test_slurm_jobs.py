"""The lessons as jobs of a real Slurm: they run, survive their time limit and a killed rank, and end with the cause."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from conftest import REPOSITORY
from slurm_cluster import SlurmCluster
from test_survive import assert_equal, final_state

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHORT = ["--limit_train", 80, "--limit_val", 16, "--batch_size", 4, "--epochs", 2, "--loader", "memory"]
SHORT += ["--log_interval", 1, "--save_interval", 4]
STEP_4 = "epoch 1  step +4/"
WAITING = """
import itertools, os, runpy, signal, time
from workshop.log import Log
start_step, steps = Log.start_step, itertools.count(1)
set_handler, arrived = signal.signal, []

def set_handler_that_notes(number, handler):
    to_note = number == signal.SIGUSR1 and callable(handler)  # a loader's worker ignores the signal
    noting = (lambda *received: arrived.append(handler(*received))) if to_note else handler
    return set_handler(number, noting)

def wait_in_step_5(log):
    if next(steps) == 5 and "SLURM_RESTART_COUNT" not in os.environ:
        while not arrived:
            time.sleep(0.1)
    start_step(log)

signal.signal, Log.start_step = set_handler_that_notes, wait_in_step_5
runpy.run_path("train.py", run_name="__main__")
"""
"""a script that takes its fifth step when the signal has arrived"""
SLOW = """
import itertools, os, runpy, time
from workshop.log import Log
start_step, steps = Log.start_step, itertools.count(1)

def slow_step(log):
    if "SLURM_RESTART_COUNT" not in os.environ:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        print(f"rank {rank} begins step {next(steps)}", flush=True)
        time.sleep(5)
    start_step(log)

Log.start_step = slow_step
runpy.run_path("train.py", run_name="__main__")
"""
"""a script whose steps take 5 s, until it is requeued"""


@dataclass
class Jobs:
    """Submits jobs from a copy of the lessons, and reads what they leave."""

    slurm: SlurmCluster
    data_dir: Path
    folder: Path

    def submit(self, script: str, *options: object, instead: str = "") -> int:
        """Submit a job file with options of sbatch, its name, and flags; return the job's number.

        Args:
            instead: the text of a script that runs instead of train.py.
        """
        lesson = self.folder / Path(script).parent
        for name in (lesson.name, "slurm"):
            shutil.copytree(REPOSITORY / name, self.folder / name, dirs_exist_ok=True)
        (lesson / "instead.py").write_text(instead)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the copy has no .venv of its own
        variables = f"WORKSHOP_DATA={self.data_dir},WORKSHOP_RUNS={self.folder}/runs,PYTHONPATH={REPOSITORY}"
        variables += ",SCRIPT=instead.py" if instead else ""
        words = [f"--export=ALL,PATH={path},{variables}", *options]
        return self.slurm.submit(*map(str, words), cwd=lesson)

    def log(self, job: int) -> str:
        return "".join(file.read_text() for file in self.folder.glob(f"*/{job}.log"))

    def wait_for(self, line: str, job: int) -> None:
        """Wait until a line with this regular expression is in the job's log."""
        until = time.monotonic() + 300
        while not re.search(line, self.log(job)):
            assert time.monotonic() < until and "error" not in self.log(job), f"no {line} in:\n{self.log(job)}"
            time.sleep(0.1)

    def run_dir(self, job: int) -> Path:
        (folder,) = self.folder.glob(f"runs/*/{job}")
        return folder


def short(script: str) -> list:
    """The flags of a short run of a lesson's script."""
    if script.startswith("05"):
        return [
            "--width",
            64,
            "--depth",
            2,
            "--sequence_length",
            16,
            *(x for x in SHORT if x not in ("--loader", "memory")),
        ]
    return SHORT


@pytest.fixture
def jobs(slurm: SlurmCluster, data_dir: Path, tmp_path: Path) -> Jobs:
    return Jobs(slurm, data_dir, tmp_path)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("01_single_gpu/job.slurm", 1),
        pytest.param("02_dataparallel/job.slurm", 1, marks=pytest.mark.thorough),
        pytest.param("03_ddp/torchrun.slurm", 2, marks=pytest.mark.thorough),
        pytest.param("04_mixed_precision/job.slurm", 2, marks=pytest.mark.thorough),
        pytest.param("05_fully_sharded/job.slurm", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_job_of_each_lesson_runs(jobs: Jobs, script: str, ranks: int) -> None:
    cpus = 2 if script.endswith("torchrun.slurm") else 1
    nodes = ["--nodes=2", "--ntasks-per-node=1"] if ranks > 1 and cpus == 1 else []
    job = jobs.submit(script, f"--cpus-per-task={cpus}", *nodes, Path(script).name, *short(script))
    assert jobs.slurm.wait(job) == "COMPLETED", jobs.log(job)
    summary = json.loads((jobs.run_dir(job) / "summary.json").read_text())
    assert (summary["world_size"], len(summary["epochs"])) == (ranks, 2)
    assert summary["config"]["num_workers"] == summary["hardware"]["threads"] == 1
    assert jobs.log(job).count("epoch 2  train loss") == 1
    assert len(list(jobs.folder.glob(f"0*/{job}*.lprof"))) == (1 if ranks == 1 else 0)


@pytest.mark.parametrize(
    "script",
    [
        "03_ddp/job.slurm",
        pytest.param("03_ddp/torchrun.slurm", marks=pytest.mark.thorough),
        pytest.param("05_fully_sharded/job.slurm", marks=pytest.mark.thorough),
    ],
)
def test_a_job_that_is_stopped_before_its_time_limit_is_requeued_and_goes_on(jobs: Jobs, script: str) -> None:
    """The signal is sent by hand here, as Slurm does before the limit; a run without it ends alike."""
    name, cpus = Path(script).name, "--cpus-per-task=2" if script.endswith("torchrun.slurm") else "--cpus-per-task=1"
    job = jobs.submit(script, cpus, name, *short(script), instead=WAITING)
    jobs.wait_for(STEP_4, job)
    jobs.slurm.run("scancel", "--signal=USR1", str(job))
    assert jobs.slurm.wait(job) == "COMPLETED", jobs.log(job)
    log = jobs.log(job)
    assert jobs.slurm.job(job)["Restarts"] == "1", log
    assert "stopped and saved in epoch 1; --resume true continues after step 5\n" in log
    assert re.search(r"resumed from \S+: epoch 1, after step 5\n", log)
    steps = re.findall(r"^[\d:]+  epoch (\d+)  step +(\d+)/", log, re.MULTILINE)
    assert len(steps) == len(set(steps)) == 20  # each step was taken once
    whole = jobs.submit(script, cpus, name, *short(script))
    assert jobs.slurm.wait(whole) == "COMPLETED", jobs.log(whole)
    assert_equal(final_state(jobs.run_dir(job)), final_state(jobs.run_dir(whole)))


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["03_ddp/job.slurm", "05_fully_sharded/job.slurm"])
def test_slow_steps_and_a_long_log_interval_do_not_delay_the_stop(jobs: Jobs, script: str) -> None:
    """All ranks agree to stop in the step during which the signal arrives, or in the next one."""
    options = ["--cpus-per-task=1", "job.slurm", *short(script), "--log_interval", 1000, "--save_interval", 1000]
    job = jobs.submit(script, *options, instead=SLOW)
    jobs.wait_for("rank 0 begins step 2\n", job)
    jobs.slurm.run("scancel", "--signal=USR1", str(job))
    assert jobs.slurm.wait(job) == "COMPLETED", jobs.log(job)
    log = jobs.log(job)
    stopped = re.search(r"stopped and saved in epoch 1; --resume true continues after step (\d+)\n", log)
    assert stopped and int(stopped[1]) <= 3, log
    assert re.search(rf"resumed from \S+: epoch 1, after step {stopped[1]}\n", log)


@pytest.mark.parametrize(
    "script", ["03_ddp/job.slurm", pytest.param("03_ddp/torchrun.slurm", marks=pytest.mark.thorough)]
)
def test_a_killed_rank_ends_the_job_and_the_log_ends_with_the_cause(jobs: Jobs, script: str) -> None:
    """Far sooner than after --timeout_minutes, here an hour."""
    options = ["--nodes=2", "--ntasks-per-node=1", Path(script).name, *SHORT, "--timeout_minutes", 60]
    job = jobs.submit(script, *options, instead=WAITING)
    jobs.wait_for(STEP_4, job)
    ranks = [
        process.info["pid"] for process in psutil.process_iter(["pid", "environ"]) if is_rank(process.info, "1", job)
    ]
    os.kill(ranks[0], signal.SIGKILL)
    assert jobs.slurm.wait(job) == "FAILED", jobs.log(job)
    assert re.search("Killed|SIGKILL|signal 9", "\n".join(jobs.log(job).splitlines()[-12:])), jobs.log(job)
    # torchrun's ranks are sessions of their own, which this Slurm without cgroups does not find on the other node.
    for process in psutil.process_iter(["pid", "environ"]):
        if is_rank(process.info, "0", job):
            process.kill()


def is_rank(info: dict, rank: str, job: int) -> bool:
    """Whether a process is that rank of the job, or one of its loader's workers."""
    environment = info["environ"] or {}  # None for the processes of others
    mine = environment.get("RANK", environment.get("SLURM_PROCID"))
    return environment.get("SLURM_JOB_ID") == str(job) and mine == rank and "SLURM_STEP_ID" in environment


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "ranks", "name"),
    [
        ("03_ddp/job.slurm", 2, "{job}_rank%q{{SLURM_PROCID}}"),
        ("01_single_gpu/job.slurm", 1, "{job}"),
    ],
)
def test_nsys_records_each_rank_of_a_job_without_an_edit(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, ranks: int, name: str
) -> None:
    nsys = tmp_path / "bin/nsys"  # stands for Nsight Systems: notes its flags, and runs the command after them
    nsys.parent.mkdir()
    nsys.write_text(
        f'#!/bin/bash\necho "$@" > {tmp_path}/nsys_$SLURM_PROCID\nwhile [ "$1" != python ]; do shift; done\nexec "$@"\n'
    )
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nsys.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NSYS", "1")
    job = jobs.submit(script, "--cpus-per-task=1", "job.slurm", *SHORT, "--trace", "true")
    assert jobs.slurm.wait(job) == "COMPLETED", jobs.log(job)
    for rank in range(ranks):
        flags = (tmp_path / f"nsys_{rank}").read_text()
        assert (
            f"--capture-range=cudaProfilerApi --capture-range-end=stop -o {name.format(job=job)} python train.py"
            in flags
        )


def test_a_mistake_ends_all_ranks_of_a_job_with_one_line(jobs: Jobs) -> None:
    job = jobs.submit("03_ddp/job.slurm", "--cpus-per-task=1", "job.slurm", *SHORT, "--global_batch_size", 65)
    assert jobs.slurm.wait(job) == "FAILED", jobs.log(job)
    assert jobs.slurm.job(job)["ExitCode"].startswith("2:")
    assert jobs.log(job).count("error: --global_batch_size 65 cannot be shared evenly by 2 ranks") == 1


@pytest.mark.thorough
def test_two_tasks_without_srun_are_one_line(jobs: Jobs) -> None:
    wrap = ["--ntasks=2", "--output=%j.log", f"--wrap={sys.executable} train.py"]
    job = jobs.submit("03_ddp/job.slurm", *wrap)
    assert jobs.slurm.wait(job) == "FAILED"
    assert "only one of 2 tasks of this job was started: write srun before it" in jobs.log(job)
