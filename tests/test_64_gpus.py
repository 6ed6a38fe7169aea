"""The job file for 64 GPUs, on the small Slurm of the tests: it survives its time limit and a killed rank."""

import dataclasses
import os
import re
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

import check_node
from conftest import REPOSITORY
from slurm_cluster import SlurmCluster
from test_slurm_jobs import STEP_4, WAITING, Jobs, is_rank, short
from test_survive import assert_equal, final_state

LESSON = "05_fully_sharded/job.slurm"
OPTIONS = ["--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=1"]
JOB = "../slurm/64_gpus.slurm"
PAGE = (REPOSITORY / "docs/64_gpus.md").read_text()
PAGES = PAGE + (REPOSITORY / "docs/long_run.md").read_text()


class Jobs64(Jobs):
    """Submits 64_gpus.slurm from the folder of lesson 05, on two nodes with two ranks each."""

    def start(self, *flags: object, options: tuple = (), instead: str = "") -> int:
        return self.submit(LESSON, *OPTIONS, *options, JOB, *short(LESSON), *flags, instead=instead)

    def log(self, job: int) -> str:
        files = [*self.folder.glob(f"*/{job}.log"), *self.folder.glob(f"*/logs/{job}/rank*.log")]
        return "".join(file.read_text() for file in sorted(files))

    def uninterrupted(self) -> dict:
        """Run a job to its end; return the state that it saves."""
        job = self.start()
        assert self.slurm.wait(job) == "COMPLETED", self.log(job)
        files = sorted(file.name for file in self.folder.glob(f"05_fully_sharded/logs/{job}/*"))
        assert files == [f"rank{rank:03}.log" for rank in range(4)]
        assert self.log(job).count("not checked, because there are no GPUs of NVIDIA") == 2  # once for each node
        return final_state(self.run_dir(job))

    def kill_rank(self, rank: int, job: int) -> None:
        processes = psutil.process_iter(["pid", "environ"])
        os.kill(next(found.pid for found in processes if is_rank(found.info, str(rank), job)), signal.SIGKILL)


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def jobs(slurm: SlurmCluster, data_dir: Path, tmp_path: Path) -> Jobs64:
    return Jobs64(slurm, data_dir, tmp_path)


@pytest.mark.thorough
def test_a_job_that_reaches_its_time_limit_is_requeued_and_ends_as_one_that_does_not(jobs: Jobs64) -> None:
    """The ranks wait in step 5 until Slurm sends the signal, between 90 s and 150 s after the start."""
    stopped = jobs.start(options=("--time=3", "--signal=USR1@30"), instead=WAITING)
    assert jobs.slurm.wait(stopped, seconds=600) == "COMPLETED", jobs.log(stopped)
    assert jobs.slurm.job(stopped)["Restarts"] == "1", jobs.log(stopped)
    assert re.search(r"stopped and saved in epoch 1; --resume true continues after step \d+\n", jobs.log(stopped))
    assert_equal(final_state(jobs.run_dir(stopped)), jobs.uninterrupted())


@pytest.mark.thorough
def test_a_job_that_waits_for_the_failure_of_another_goes_on_in_its_folder(jobs: Jobs64) -> None:
    """After kill -9 of a rank the job has failed, and Slurm does not requeue it."""
    killed = jobs.start(instead=WAITING)
    jobs.wait_for(STEP_4, killed)  # after this line the ranks save, and wait in step 5
    folder = jobs.run_dir(killed)
    wait_until(lambda: len(list(folder.glob("checkpoints/*/crc32_*.json"))) == 4)
    successor = jobs.start("--run_dir", folder, options=(f"--dependency=afternotok:{killed}",))
    jobs.kill_rank(3, killed)
    assert jobs.slurm.wait(killed) == "FAILED", jobs.log(killed)
    assert re.search(r"task 3: Killed", jobs.log(killed)), jobs.log(killed)
    assert jobs.slurm.wait(successor) == "COMPLETED", jobs.log(successor)
    assert re.search(r"resumed from \S+: epoch 1, after step 4\n", jobs.log(successor))
    assert_equal(final_state(folder), jobs.uninterrupted())


@pytest.mark.parametrize(
    ("granted", "errors", "remapped", "found"),
    [
        (2, [["0", "0"], ["1", "0"]], [["a", "No"], ["b", "No"]], []),
        (2, [["0", "[N/A]"], ["1", "[N/A]"]], [], []),
        (2, [["0", "0"]], [], ["2 GPUs were granted, 1 are there"]),
        (2, [["0", "0"], ["1", "10"]], [["a", "0"], ["b", "0"]], ["GPU 1 has 10 uncorrected memory errors"]),
        (1, [["0", "0"]], [["a", "Yes"]], ["GPU a could not remap a row of memory"]),
    ],
)
def test_what_is_wrong_with_a_node_is_named(granted: int, errors: list, remapped: list, found: list[str]) -> None:
    assert check_node.faults(granted, errors, remapped) == found


def test_a_node_whose_driver_does_not_answer_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "node017"}.items():
        monkeypatch.setenv(name, value)
    assert check_node.main() == 1
    assert capsys.readouterr().out.startswith("node017: nvidia-smi does not answer")


def test_the_job_file_saves_before_its_limit_and_goes_on() -> None:
    """The page explains the options of lesson 05's job file, and the options for whole nodes."""
    job, lesson = (
        {
            line.split()[1].partition("=")[0]
            for line in (REPOSITORY / name).read_text().splitlines()
            if "#SBATCH" in line[:7]
        }
        for name in ("slurm/64_gpus.slurm", "05_fully_sharded/job.slurm")
    )
    assert lesson - job == set() and job - lesson == {"--exclusive"}


def blocks_of_python() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_lines_for_samples_of_different_lengths() -> None:
    names: dict = {}
    exec(blocks_of_python()[0], names)
    inputs, targets = names["padded"]([(torch.arange(4), torch.arange(1, 5)), (torch.arange(2), torch.arange(1, 3))])
    assert inputs.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert targets.tolist() == [[1, 2, 3, 4], [1, 2, -100, -100]]


def test_the_numbers_of_steps_and_tokens_on_the_page() -> None:
    number = r"([\d,]+)"
    (found,) = re.findall(rf"{number} × {number} / {number} = {number};", PAGE)
    epochs, samples, batch, steps = (int(text.replace(",", "")) for text in found)
    assert epochs * samples / batch == steps
    assert re.search(rf"--limit_train {samples} --limit_val 2048\s+--epochs {epochs} ", PAGE)
    assert f"--global_batch_size {batch} " in PAGE
    assert round(steps * batch * 2048 / 1e9) == 132 and 614_400 * 4 / 512 == 4800
    assert round(500 * batch * 2048 / 487_000 / 60) == 72


def test_each_flag_of_the_pages_is_one_of_lesson_05_or_of_a_program() -> None:
    """Slurm's options, torchrun's and others are in the list; what is left must be a flag of train.py."""
    lesson = runpy.run_path(str(REPOSITORY / "05_fully_sharded/train.py"))
    flags = {field.name for field in dataclasses.fields(lesson["Config"])} | {"config"}
    of_programs = {"nodes", "gres", "exclusive", "mem", "time", "signal", "requeue", "exclude", "dependency", "output"}
    of_programs |= {"sm", "world", "report", "jobid", "overlap", "pid", "prefix", "two_nodes"}
    of_programs |= {"array", "wrap", "start", "label", "standalone"}
    of_programs |= {"gpu", "gb", "weights", "tokens", "hours", "script", "cases", "published"}
    of_programs |= {"data_tokens", "gpus_per_node", "network"}  # all of these of plan.py
    of_programs |= {"validation", "every", "tokenizer", "upper"}  # of write_tokens.py
    assert set(re.findall(r"(?<![\w-])--(\w+)(?![\w-])", PAGES)) <= flags | of_programs
