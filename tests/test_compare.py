"""One device, DataParallel and DDP on the same work: who competes on which machine, and the table of results."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import Script
from contenders import comparison_table, contenders, rows

OTHER_FIGURES = {"diagnosis": "fine", "peak_memory_bytes": 1}  # beside the trials, in what train.py writes


@pytest.fixture
def compare(run_script: Script) -> Script:
    return partial(run_script, "02_dataparallel/experiments/compare.py")


def test_without_gpus_threads_are_the_devices() -> None:
    one, all_threads, parallel, ddp = contenders(gpus=0, cpus=4)
    assert (one.threads, one.ranks, all_threads.threads) == (1, None, 4)
    assert parallel.reason == "not measured: needs two GPUs, found 0"
    assert (ddp.ranks, ddp.threads) == (2, 1)
    assert [c.name for c in contenders(0, 1)] == ["one process, 1 thread", "DataParallel", "DDP, 2 ranks of 1 thread"]


def test_with_gpus_each_rank_has_one() -> None:
    one, parallel, ddp = contenders(gpus=4, cpus=16)
    assert (one.lesson, parallel.lesson, ddp.lesson) == ("01_single_gpu", "02_dataparallel", "03_ddp")
    assert (parallel.reason, ddp.ranks, ddp.threads) == ("", 4, 4)
    assert contenders(gpus=1, cpus=2)[1].reason == "not measured: needs two GPUs, found 1"


@pytest.mark.parametrize("gpus", range(1, 9))
def test_whatever_the_number_of_gpus_the_ranks_can_share_the_batch(
    gpus: int, monkeypatch: pytest.MonkeyPatch, compare: Script, tmp_path: Path
) -> None:
    batches = set()

    def answer(command: list, *_: object, **__: object) -> dict:
        batches.add(next(command[i + 1] for i, word in enumerate(command) if str(word).endswith("batch_size")))
        return {kind: {"trials": [10.0, 11.0, 12.0]} for kind in ("SYNTHETIC", "FULL")} | OTHER_FIGURES

    monkeypatch.setattr("lab.launching.run_and_read", answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert compare("--out", tmp_path).status == 0
    (batch,) = batches
    assert batch % gpus == 0 and 64 <= batch < 64 + gpus


def test_the_table_has_ratios_to_the_first_row() -> None:
    one, parallel, ddp = contenders(gpus=0, cpus=1)
    one = replace(one, trials={"SYNTHETIC": [100, 110, 90], "FULL": [80, 80, 80]})
    ddp = replace(ddp, trials={"SYNTHETIC": [180, 180, 180], "FULL": [150, 160, 170]})
    found = rows([one, parallel, ddp])
    assert [row["SYNTHETIC"]["ratio"] for row in (found[0], found[2])] == [1, pytest.approx(1.8)]
    assert found[0]["SYNTHETIC"]["std"] == pytest.approx(10)
    lines = comparison_table(found).splitlines()
    assert "not measured: needs two GPUs, found 0" in lines[2]
    assert lines[3].split()[-5:] == ["1.80x", "160", "+/-", "10", "2.00x"]


def test_all_get_the_same_work(monkeypatch: pytest.MonkeyPatch, compare: Script, tmp_path: Path) -> None:
    """The whole command, with launches that answer at once."""
    started = []

    def answer(command: list, folder: Path, *, flag: str, out: Path, threads: int) -> dict:
        started.append((folder.name, command, threads))
        return {kind: {"trials": [10.0, 11.0, 12.0]} for kind in ("IO", "SYNTHETIC", "FULL")} | OTHER_FIGURES

    monkeypatch.setattr("lab.launching.run_and_read", answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = compare("--rounds", 2, "--global_batch_size", 32, "--limit_train", 640, "--ranks", 2, "--out", tmp_path)
    assert result.status == 0, result.stderr
    assert {folder for folder, _, _ in started} == {"01_single_gpu", "03_ddp"}
    for folder, script, _ in started:
        flags = [str(word) for word in script]
        batch = "--global_batch_size" if folder == "03_ddp" else "--batch_size"
        assert flags[flags.index(batch) + 1] == "32"
        assert flags[flags.index("--limit_train") + 1] == "640"
    assert "not measured: needs two GPUs, found 0" in result.stdout
    results = json.loads((tmp_path / "compare.json").read_text())
    assert results["rows"][0]["FULL"]["trials"] == [10, 11, 12, 10, 11, 12]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", 0], "--rounds must be at least 1, got 0"),
        (["--loadr", "map"], "unknown flag --loadr; did you mean --loader?"),
        (["--batch_size", 8], "--batch_size is set by this script itself"),
        (["--global_batch_size", -1], "--global_batch_size must be at least 1, got -1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(compare: Script, tmp_path: Path, flags: list, message: str) -> None:
    result = compare("--out", tmp_path, *flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
