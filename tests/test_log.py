"""The log measures the wait for batches and the rest of a step apart, with a clock that only the test moves."""

import re
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY
from lab.launching import load_script
from slow_work import Clock
from workshop import log as log_module
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.log import Log
from workshop.ranks import Ranks
from workshop.run import RunFolder

Config = load_script(REPOSITORY / "01_single_gpu").Config


class Step:
    """Where a run is."""

    epoch, step = 1, 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_module.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.fixture
def log(tmp_path: Path) -> Log:
    config = Config(run_dir=tmp_path, log_interval=2, batch_size=8, num_workers=0)
    return Log(RunFolder(config, Ranks(device=torch.device("cpu"))))


def times_of(line: str) -> tuple[float, float]:
    """Seconds a step of a log line: load and compute."""
    load, compute = re.search(r"load ([\d.]+) ms  compute ([\d.]+) ms", line).groups()
    return float(load) / 1000, float(compute) / 1000


def run(log: Log, clock: Clock, waits: list[float], computes: list[float], after: float = 0.0) -> None:
    """An epoch whose batches and steps take so long; the log line of a step comes before its last ``after`` seconds."""
    loader = BatchLoader()
    loader.batch_sampler = DistributedBatchSampler(8 * len(waits), 8)
    log.board = type("Board", (), {"add_scalar": lambda *_: None})()
    log.start_epoch(loader)
    for number, (wait, compute) in enumerate(zip(waits, computes, strict=True), start=1):
        clock.sleep(wait)
        log.start_step()
        clock.sleep(compute)
        Step.step = number
        log.log_step(Step, loss=0.5)
        clock.sleep(after)
        log.end_step()


def test_load_and_compute_are_measured_apart_over_the_last_steps(
    log: Log, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    run(log, clock, [8.0, 2.0, 4.0], [10.0, 20.0, 40.0])
    assert [times_of(line) for line in capsys.readouterr().out.splitlines()] == [(8, 10), (5, 15), (3, 30)]


def test_time_after_a_log_line_still_counts(log: Log, clock: Clock, capsys: pytest.CaptureFixture) -> None:
    run(log, clock, [1.0, 1.0], [2.0, 2.0], after=4.0)
    assert [times_of(line) for line in capsys.readouterr().out.splitlines()] == [(1, 2), (1, 4)]


def test_a_second_epoch_does_not_count_the_validation_before_it(
    log: Log, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    run(log, clock, [1.0], [2.0])
    clock.sleep(100)
    run(log, clock, [1.0], [2.0])
    assert [times_of(line) for line in capsys.readouterr().out.splitlines()] == [(1, 2), (1, 2)]


def test_each_line_begins_with_the_time(log: Log, capsys: pytest.CaptureFixture) -> None:
    log.print("epoch 1")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  epoch 1\n", capsys.readouterr().out)


def test_only_what_a_run_writes_is_moved_away(tmp_path: Path) -> None:
    """The folder of a run may be the user's own, as with ``--run_dir .``."""
    own = ["checkpoint.backup-from-may", "checkpoints/notes.txt", "rank1.csv", "trace.txt"]
    of_a_run = ["summary.json", "checkpoint.pt", "checkpoint.previous.pt", "checkpoints/epoch0001_step0000000/x"]
    for name in own + of_a_run:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with RunFolder(Config(run_dir=tmp_path), Ranks(device=torch.device("cpu"))):
        pass
    assert all((tmp_path / name).exists() for name in own)
    assert all((tmp_path / "earlier/1" / name).exists() and not (tmp_path / name).exists() for name in of_a_run)
