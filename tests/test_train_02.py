"""Lesson 02: without two GPUs it says that DataParallel does nothing, and trains like lesson 01; the comparison."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import REPOSITORY, Script

COMPARE = "02_dataparallel/experiments/compare.py"
FEW = ("--limit_train", 640, "--limit_val", 100, "--loader", "memory")


def test_it_says_that_it_does_nothing_and_trains_as_lesson_01(run_script: Script, tmp_path: Path) -> None:
    summaries, weights = [], []
    for lesson in ("01_single_gpu", "02_dataparallel"):
        result = run_script(f"{lesson}/train.py", *FEW, "--run_dir", tmp_path / lesson)
        assert result.status == 0, result.stderr
        summaries.append(json.loads((tmp_path / lesson / "summary.json").read_text()))
        weights.append(torch.load(tmp_path / lesson / "checkpoint.pt", weights_only=True)["model"])
    assert "DataParallel does nothing here: it found 0 GPU(s); training on one device" in result.stdout
    alone, parallel = summaries
    assert parallel["epochs"][0]["val_loss"] == alone["epochs"][0]["val_loss"]
    assert weights[0].keys() == weights[1].keys(), "other scripts can load the weights"


class TwoReplicas(nn.Module):
    """Stands for DataParallel on a machine with two GPUs."""

    device_ids = (0, 1)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)


def test_it_says_how_many_gpus_it_uses(run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "DataParallel", TwoReplicas)
    result = run_script("02_dataparallel/train.py", *FEW, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert "DataParallel uses 2 GPUs" in result.stdout


def test_the_job_has_one_task() -> None:
    assert "--ntasks=1 " in (REPOSITORY / "02_dataparallel" / "job.slurm").read_text()


@pytest.mark.parametrize(
    ("gpus", "names", "lessons"),
    [
        (0, ["one process, 1 thread", "one process, 4 threads", "DataParallel", "DDP, 2 ranks of 1 thread"], "113"),
        (1, ["one GPU", "DataParallel", "DDP, 1 rank(s) of one GPU"], "13"),
        (4, ["one GPU", "DataParallel, 4 GPUs", "DDP, 4 rank(s) of one GPU"], "123"),
    ],
)
def test_the_comparison_gives_all_the_same_work(
    gpus: int, names: list, lessons: str, run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []

    def train(lesson: Path, *flags: object, ranks: int | None = None, threads: int) -> dict:
        batch = "--global_batch_size" if lesson.name == "03_ddp" else "--batch_size"
        started.append(
            (lesson.name[1], flags[flags.index(batch) + 1], flags[flags.index("--limit_train") + 1], threads)
        )
        return {kind: {"trials": [10.0 * threads, 11.0 * threads, 12.0 * threads]} for kind in ("SYNTHETIC", "FULL")}

    monkeypatch.setattr("lab.launching.train", train)
    monkeypatch.setattr("workshop.hardware.available_cpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    result = run_script(COMPARE, "--rounds", 2, "--limit_train", 640, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    assert [lesson for lesson, *_ in started] == [*lessons] * 2, "each twice, alternately"
    assert {(batch, samples) for _, batch, samples, _ in started} == {(64, "640")}
    (file,) = tmp_path.glob("*/compare.json")
    table = json.loads(file.read_text())
    assert [row[0] for row in table["rows"]] == names
    if gpus < 2:
        assert f"not measured: needs two GPUs, found {gpus}" in result.stdout
    if gpus == 0:
        assert table["rows"][1][1:3] == [[44.0, pytest.approx(3.578, abs=0.001)], 4.0], "mean, deviation, ratio"


def test_the_comparison_needs_a_batch_that_the_ranks_can_share(run_script: Script) -> None:
    assert "multiple of the 2 ranks" in run_script(COMPARE, "--global_batch_size", 7).error
