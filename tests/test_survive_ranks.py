"""Runs of several ranks that survive: they stop together, continue bit for bit, and name a rank that failed."""

import importlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from conftest import REPOSITORY, Result, Script
from ranks import free_port, start_ranks
from test_survive import assert_equal, one_line, results_of, state_of

pytestmark = pytest.mark.slow

LESSON = REPOSITORY / "03_ddp"
SIGNALLED = REPOSITORY / "tests" / "signalled.py"
DETECTOR = importlib.import_module("workshop.distributed.failure_detector")  # the package has a function of this name
SHORT = ["--limit_train", 80, "--limit_val", 16, "--global_batch_size", 8, "--epochs", 2, "--save_interval", 4]
SHORT += ["--loader", "memory", "--num_workers", 0]  # 10 steps an epoch, of a model with dropout


@pytest.fixture
def start(user_environment: dict[str, str]) -> partial:
    return partial(start_ranks, 2, cwd=LESSON, environment=user_environment)


def statuses(results: list[Result]) -> list[int]:
    return [result.status for result in results]


def test_two_ranks_stop_together_and_continue_bit_for_bit(start: partial, run_script: Script, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert statuses(start("train.py", *SHORT, "--run_dir", whole)) == [0, 0]

    stopped = start(SIGNALLED, 1, 12, "SIGUSR1", "train.py", *SHORT, "--run_dir", parts)
    assert statuses(stopped) == [0, 0], stopped[0].stderr
    assert "stopped by SIGUSR1: saved after step" in stopped[0].stdout
    assert "of epoch 2; --resume true continues from there" in stopped[0].stdout

    alone = partial(run_script, "03_ddp/train.py", *SHORT, "--resume", "true", "--run_dir", parts)
    assert "world_size is 2 there and 1 here, and it was saved in the middle of epoch 2" in one_line(alone())
    line = one_line(alone("--global_batch_size", 16))
    assert "global_batch_size is 8 there and 16 here" in line

    resumed = start("train.py", *SHORT, "--run_dir", parts, "--resume", "true")
    assert statuses(resumed) == [0, 0], resumed[0].stderr
    states = [state_of(folder) for folder in (parts, whole)]
    for state in states:
        for rank in state["run"]["ranks"]:
            del rank["random"]["python"], rank["random"]["numpy"]  # the lesson does not seed them
    assert_equal(*states)
    assert results_of(parts) == results_of(whole)
    assert not torch.equal(*(rank["random"]["torch"] for rank in states[0]["run"]["ranks"]))

    more = alone("--epochs", 3)
    assert more.status == 0, more.stderr
    assert "after epoch 2, written by 2 rank(s)" in more.stdout
    assert len(results_of(parts)) == 3


def test_three_ranks_continue_up_to_rounding(user_environment: dict[str, str], tmp_path: Path) -> None:
    """A sum of three depends on the order, and that on the buckets, which DDP arranges again after its first step."""
    start = partial(start_ranks, 3, cwd=LESSON, environment=user_environment)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*SHORT, "--global_batch_size", 9]
    assert statuses(start("train.py", *flags, "--run_dir", whole)) == [0] * 3
    stopped = start(SIGNALLED, 1, 12, "SIGUSR1", "train.py", *flags, "--run_dir", parts)
    assert "stopped by SIGUSR1" in stopped[0].stdout
    assert statuses(start("train.py", *flags, "--run_dir", parts, "--resume", "true")) == [0] * 3
    models = [state_of(folder)["model"] for folder in (parts, whole)]
    for name, weights in models[0].items():
        torch.testing.assert_close(weights, models[1][name], rtol=1e-4, atol=1e-6)


def test_two_ranks_stop_together_on_ctrl_c(start: partial, tmp_path: Path) -> None:
    results = start(SIGNALLED, 1, 12, "SIGINT", "train.py", *SHORT, "--run_dir", tmp_path)
    assert statuses(results) == [0, 0], results[1].stderr
    assert "stopped by SIGINT: saved after step" in results[0].stdout


def test_two_ranks_report_once_that_a_folder_is_not_theirs(start: partial, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("mine")
    results = start("train.py", *SHORT, "--run_dir", tmp_path)
    assert statuses(results) == [2, 2]
    (line,) = (line for result in results for line in result.stderr.splitlines())
    assert f"no run is known to have written {tmp_path}/summary.json" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_ends_the_others(
    user_environment: dict[str, str], tmp_path: Path, rank: int
) -> None:
    flags = [*SHORT, "--global_batch_size", 9, "--run_dir", tmp_path]
    command = [SIGNALLED, rank, 12, "SIGKILL", "train.py", *flags]
    results = start_ranks(3, *command, cwd=LESSON, environment=user_environment)
    # The checkpoint was saved some steps before. torchrun and srun kill the other ranks 30 s after the first has ended.
    assert time.time() - (tmp_path / "checkpoint.pt").stat().st_mtime < 30
    killed = results.pop(rank)
    assert killed.status == -9
    assert statuses(results) == [1, 1]
    errors = "".join(result.stderr for result in results)
    assert f"error: rank {rank} is lost" in errors
    assert "Traceback" not in errors
    assert errors.count("error: ") == (2 if rank == 0 else 1)  # without the store they cannot agree on who reports it
    assert errors.count(f"error: rank {rank} is lost") == errors.count("error: ")


def test_a_rank_killed_before_the_process_group_exists_is_named(start: partial, tmp_path: Path) -> None:
    results = start(SIGNALLED, 1, 0, "SIGKILL", "train.py", *SHORT, "--run_dir", tmp_path)
    assert results[1].status == -9
    assert results[0].status in (1, 2)  # either the heartbeat or gloo notices it first
    assert results[0].stderr.startswith("error: rank ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_the_others_and_by_itself(start: partial, tmp_path: Path, rank: int) -> None:
    """Rank 0 hosts the store: while rank 0 is stopped, operations on the store wait."""
    results = start(SIGNALLED, rank, 12, "SIGSTOP", "train.py", *SHORT, "--run_dir", tmp_path, woken=rank)
    assert statuses(results) == [1, 1]
    assert f"error: rank {rank} is lost" in results[1 - rank].stderr
    assert f"error: rank {rank} on" in results[rank].stderr
    assert f"rank {1 - rank}" not in results[rank].stderr


def test_a_stopped_rank_0_does_not_keep_the_others_from_exiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(DETECTOR, "PERIOD", 2.0)
    monkeypatch.setattr(DETECTOR, "TIMEOUT", 3.0)
    port, (connected, connect), (stopped, stop) = free_port(), os.pipe(), os.pipe()

    def be(rank: int) -> None:
        store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        if rank == 0:
            os.read(connected, 1)
            os.kill(os.getpid(), signal.SIGSTOP)
        heartbeat = DETECTOR.Heartbeat(store, rank, 2)
        os.write(connect, b"1")
        os.read(stopped, 1)
        signal.alarm(60)
        heartbeat.close()

    processes = []
    for rank in (0, 1):
        processes.append(os.fork())
        if processes[rank] == 0:
            try:
                be(rank)
            finally:
                os._exit(0)
    try:
        os.waitpid(processes[0], os.WUNTRACED)
        os.write(stop, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(processes[1], 0)[1]) == 1
    finally:
        os.kill(processes[0], signal.SIGKILL)
        os.waitpid(processes[0], 0)
        for end in (connected, connect, stopped, stop):
            os.close(end)
    assert "error: rank 0 is lost, or its node" in capfd.readouterr().err


@pytest.mark.parametrize("error", [None, KeyError("lost")], ids=["done", "failed"])
def test_both_threads_of_a_rank_end_with_its_training(monkeypatch: pytest.MonkeyPatch, error: KeyError | None) -> None:
    monkeypatch.setattr(DETECTOR, "PERIOD", 0.1)
    store, before = HashStore(), set(threading.enumerate())
    store.set(DETECTOR.HEARTBEAT_KEY.format(0), "0")
    heartbeat = DETECTOR.Heartbeat(store, 1, 2)
    threads = set(threading.enumerate()) - before
    heartbeat.report_failure(error) if error else heartbeat.close()
    for thread in threads:
        thread.join(10)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)


def test_a_rank_that_fails_is_named(start: partial, tmp_path: Path) -> None:
    results = start(SIGNALLED, 1, 12, "KeyboardInterrupt", "train.py", *SHORT, "--run_dir", tmp_path)
    assert results[0].status == 1
    assert "failed: KeyboardInterrupt" in results[0].stderr
