"""The job file for 64 GPUs, on the small Slurm of the tests: it survives its time limit and a killed rank."""

import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest

import check_node
from conftest import REPOSITORY
from slurm_cluster import SlurmCluster
from test_slurm_jobs import STEP_4, WAITING, Jobs, is_rank, short
from test_survive import assert_equal, final_state

LESSON = "05_fully_sharded/job.slurm"
OPTIONS = ["--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=1"]
JOB = "../slurm/64_gpus.slurm"
PAGE = (REPOSITORY / "docs/64_gpus.md").read_text()


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


class Bytes:
    """Stands in for a tokenizer of the package tokenizers: each byte is a token, and 256 is the end of a text."""

    vocabulary = 257

    @classmethod
    def from_file(cls, file: str) -> "Bytes":
        assert file == "tokenizer.json"
        return cls()

    def token_to_id(self, token: str) -> int:
        return {"<|endoftext|>": 256}[token]

    def get_vocab_size(self) -> int:
        return self.vocabulary

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(257, numpy.uint16), (70_000, numpy.uint32)])
def test_the_script_on_the_page_writes_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, dtype: type
) -> None:
    texts = [f"text {number}" for number in range(400)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(Bytes, "vocabulary", vocabulary)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Bytes))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["write_tokens.py", str(tmp_path / "texts.jsonl"), str(tmp_path)])
    exec(blocks_of_python()[0], {})
    written = {}
    for name in ("train", "val"):
        tokens = numpy.fromfile(tmp_path / f"{name}.{dtype.__name__}", dtype).tolist()
        parts = "".join("\n" if token == 256 else chr(token) for token in tokens)
        written[name] = parts.splitlines()
    assert len(written["val"]) == 2 and sorted(written["val"] + written["train"]) == sorted(texts)
    assert written["train"] != sorted(written["train"], key=texts.index)


def test_the_data_set_on_the_page_reads_a_file_of_tokens_and_pads(tmp_path: Path) -> None:
    numpy.arange(21, dtype=numpy.uint16).tofile(tmp_path / "train.uint16")
    names: dict = {}
    exec(blocks_of_python()[1], names)
    data = names["TokenFile"](tmp_path / "train.uint16", 4)
    assert len(data) == 5
    inputs, targets = data[1, 4]
    assert inputs.tolist() == [16, 17, 18, 19] and targets.tolist() == [17, 18, 19, 20]
    inputs, targets = names["padded"]([data[1, 0], (inputs[:2], targets[:2])])
    assert inputs.tolist() == [[0, 1, 2, 3], [16, 17, 0, 0]]
    assert targets.tolist() == [[1, 2, 3, 4], [17, 18, -100, -100]]
    limited = names["TokenFile"](tmp_path / "train.uint16", 4, limit=2)
    assert len(limited) == 2 and limited.tokens is None  # nothing large is pickled for a worker
    first = [int(limited[epoch, index][0][0]) for epoch in (1, 2, 3) for index in (0, 1)]
    assert first == [0, 4, 8, 12, 16, 0] and int(limited[0, 1][0][0]) == 4  # epoch 0 is the validation's
    numpy.array([70_000, 1, 2], numpy.uint32).tofile(tmp_path / "large.uint32")
    assert names["TokenFile"](tmp_path / "large.uint32", 2)[1, 0][0].tolist() == [70_000, 1]


@pytest.mark.thorough
def test_the_script_on_the_page_validates_a_checkpoint(
    tmp_path: Path, data_dir: Path, user_environment: dict[str, str]
) -> None:
    shutil.copy(REPOSITORY / "05_fully_sharded/train.py", tmp_path)
    script = next(block for block in blocks_of_python() if block.startswith("# validate.py"))
    (tmp_path / "validate.py").write_text(script)
    flags = ["--width", "64", "--depth", "1", "--sequence_length", "16", "--limit_train", "64", "--limit_val", "32"]
    flags += ["--num_workers", "0", "--data_dir", str(data_dir)]
    environment = user_environment | {"PYTHONPATH": str(REPOSITORY)}

    def run(*words: str) -> str:
        command = [sys.executable, *words, *flags]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    run("train.py", "--run_dir", "run", "--resume", "true")
    (epoch,) = json.loads((tmp_path / "run/summary.json").read_text())["epochs"]
    checkpoint = "run/checkpoints/epoch0002_step0000000"
    assert f"{checkpoint}: validation loss {epoch['val_loss']:.6f}\n" in run("validate.py", checkpoint)
    log = run("train.py", "--run_dir", "other", "--resume", "true")
    assert "no checkpoint in other: training begins at step 0\n" in log


def test_the_numbers_of_steps_and_tokens_on_the_page() -> None:
    number = r"([\d,]+)"
    (found,) = re.findall(rf"{number} × {number} / {number} = {number};", PAGE)
    epochs, samples, batch, steps = (int(text.replace(",", "")) for text in found)
    assert epochs * samples / batch == steps
    assert re.search(rf"--limit_train {samples} --limit_val 2048\s+--epochs {epochs} ", PAGE)
    assert f"--global_batch_size {batch} " in PAGE
    assert round(steps * batch * 2048 / 1e9) == 132 and 614_400 * 4 / 512 == 4800
    assert round(500 * batch * 2048 / 487_000 / 60) == 72


def test_each_flag_of_the_page_is_one_of_lesson_05_or_of_a_program() -> None:
    """Slurm's options, torchrun's and others are in the list; what is left must be a flag of train.py."""
    lesson = runpy.run_path(str(REPOSITORY / "05_fully_sharded/train.py"))
    flags = {field.name for field in dataclasses.fields(lesson["Config"])} | {"config"}
    of_programs = {"nodes", "gres", "exclusive", "mem", "time", "signal", "requeue", "exclude", "dependency", "output"}
    of_programs |= {"sm", "world", "report", "jobid", "overlap", "pid", "prefix", "two_nodes"}
    of_programs |= {"array", "wrap", "start", "label", "standalone"}
    of_programs |= {"gpu", "gb", "weights", "tokens", "hours", "script", "cases", "published"}
    of_programs |= {"data_tokens", "gpus_per_node"}  # all of these of plan.py
    assert set(re.findall(r"(?<![\w-])--(\w+)(?![\w-])", PAGE)) <= flags | of_programs
