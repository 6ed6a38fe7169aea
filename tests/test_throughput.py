"""The verdict finds what was slowed on purpose."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Script

from workshop.distributed import Ranks
from workshop.loaders import Loader
from workshop.loaders.order import EpochOrder
from workshop.profiling.throughput import benchmark, verdict

SLOW, FAST = 0.004, 0.0002


class Clock:
    """Stands in for the module time: it goes on only where somebody sleeps, so no busy machine decides a test."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("workshop.profiling.throughput.time", clock)
    return clock


class SlowLoader:
    def __init__(self, clock: Clock, seconds: float, samples: int) -> None:
        self.clock = clock
        self.seconds = seconds
        self.sampler = EpochOrder(samples, 8, Ranks(device=torch.device("cpu")), seed=1, shuffle=True)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.sampler.batches():
            self.clock.sleep(self.seconds)
            yield batch, batch

    def __len__(self) -> int:
        return len(self.sampler)


def measured(clock: Clock, folder: Path, load: float, train: float, samples: int = 800) -> dict:
    def slow_model(loader: Loader) -> None:
        for _ in loader:
            clock.sleep(train)

    benchmark(SlowLoader(clock, load, samples), slow_model, "map", folder, seconds=0.15)
    return json.loads((folder / "throughput.json").read_text())


@pytest.mark.parametrize("samples", [800, 40])  # a trial is part of an epoch, or many epochs
def test_a_slow_loader_is_found_out(clock: Clock, tmp_path: Path, samples: int, capsys: pytest.CaptureFixture) -> None:
    record = measured(clock, tmp_path, load=SLOW, train=FAST, samples=samples)
    assert record["verdict"].startswith("Data-bound: ")
    assert record["IO"]["mean"] == pytest.approx(8 / SLOW)
    assert record["SYNTHETIC"]["mean"] == pytest.approx(8 / FAST)
    assert record["FULL"]["mean"] == pytest.approx(8 / (SLOW + FAST))
    assert "Try more --num_workers" in capsys.readouterr().out


def test_a_slow_model_is_found_out(clock: Clock, tmp_path: Path) -> None:
    record = measured(clock, tmp_path, load=FAST, train=SLOW)
    assert record["verdict"].startswith("Compute-bound: ")
    assert record["SYNTHETIC"]["mean"] == pytest.approx(8 / SLOW)


def test_work_that_does_not_overlap_is_found_out(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, load=SLOW, train=SLOW)["verdict"].startswith("Poor overlap: ")


def test_the_verdict_says_by_how_much() -> None:
    assert "could take 4.0 times" in verdict(io=100, synthetic=400, full=99, loader="memory")
    assert "Try --loader device" in verdict(io=100, synthetic=400, full=99, loader="memory")
    assert "could give 3.0 times" in verdict(io=300, synthetic=100, full=95, loader="map")
    assert "60% of the slower part" in verdict(io=300, synthetic=100, full=60, loader="map")


def test_the_lesson_prints_table_and_verdict(run_script: Script, tmp_path: Path) -> None:
    result = run_script("01_single_gpu/train.py", "--benchmark", "true", "--loader", "memory", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if "+/-" in line] == ["IO", "SYNTHETIC", "FULL"]
    assert "bound: " in result.stdout or "overlap: " in result.stdout
    assert "step" not in result.stdout
    record = json.loads((tmp_path / "throughput.json").read_text())
    assert record["IO"]["mean"] > record["SYNTHETIC"]["mean"]
    assert not (tmp_path / "checkpoint.pt").exists()
