"""The benchmark measures fairly, on a simulated clock, and its diagnosis finds the part that is slow."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from conftest import Script
from slow_work import FAST, SLOW, Clock, SlowLoader
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler, EpochSampler, Loader
from workshop.loaders.shards import ShardSampler
from workshop.profiling.bars import draw_bars, labels_of
from workshop.profiling.calibration import repeats_for
from workshop.profiling.throughput import Throughput, benchmark, diagnosis
from workshop.ranks import Ranks

CPU = torch.device("cpu")
MAP = SimpleNamespace(num_workers=1)
"""as far as the diagnosis knows PyTorch's own DataLoader"""
LAST_BATCH_OF_3 = 8 * 12 + 3
"""samples of an epoch of SlowLoader, whose batches have 8"""


def log_to(folder: Path, seconds: float) -> Any:  # noqa: ANN401
    """As far as the benchmark needs a log."""
    config = SimpleNamespace(benchmark_seconds=seconds)
    return SimpleNamespace(
        ranks=Ranks(device=CPU),
        config=config,
        folder=SimpleNamespace(path=folder),
        utilization=None,
        mfu=lambda _: None,
    )


def measured(clock: Clock, folder: Path, load: float, train: float, samples: int = 800) -> dict:
    def slow_model(loader: Loader) -> None:
        for inputs, _ in loader:
            assert len(inputs) == 8, "a last batch with fewer samples would be compiled for within a trial"
            clock.sleep(train)

    benchmark(log_to(folder, 0.15), SlowLoader(clock, load, samples), slow_model)
    return json.loads((folder / "throughput.json").read_text())


@pytest.mark.parametrize("samples", [800, 40, LAST_BATCH_OF_3])  # a trial is part of an epoch, or many epochs
def test_a_slow_loader_is_found_out(clock: Clock, tmp_path: Path, samples: int, capsys: pytest.CaptureFixture) -> None:
    figures = measured(clock, tmp_path, load=SLOW, train=FAST, samples=samples)
    assert figures["diagnosis"].startswith("Data-bound: ")
    assert figures["IO"]["trials"] == pytest.approx([8 / SLOW] * 3)
    assert figures["SYNTHETIC"]["trials"] == pytest.approx([8 / FAST] * 3)
    assert figures["FULL"]["trials"] == pytest.approx([8 / (SLOW + FAST)] * 3)
    assert figures["peak_memory_bytes"] > 0
    assert "Try more --num_workers" in capsys.readouterr().out


def test_a_slow_model_is_found_out(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, load=FAST, train=SLOW)["diagnosis"].startswith("Compute-bound: ")


def test_work_that_does_not_overlap_is_found_out(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, load=SLOW, train=SLOW)["diagnosis"].startswith("Poor overlap: ")


def test_both_predictions_stand_beside_full(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figures = measured(clock, tmp_path, load=SLOW, train=FAST)
    in_turn, overlapped = 8 / (SLOW + FAST), 8 / SLOW
    assert (figures["no_overlap"], figures["full_overlap"]) == pytest.approx((in_turn, overlapped))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FULL")]
    assert line.endswith(f"predicted: {in_turn:,.0f} without overlap, {overlapped:,.0f} with full overlap")


def test_a_second_benchmark_is_drawn_beside_the_first(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    drawn = []
    monkeypatch.setattr("workshop.profiling.bars.draw_bars", lambda _, rates, samples: drawn.append((rates, samples)))
    for words, load in (("--num_workers 0", SLOW), ("--loader memory", FAST)):
        monkeypatch.setattr("sys.argv", ["train.py", "--benchmark", "true", *words.split()])
        measured(clock, tmp_path, load=load, train=SLOW)
        assert str(tmp_path / "throughput.png") in capsys.readouterr().out
    (first, _), (both, samples) = drawn
    assert list(first) == ["this run"]
    assert list(both) == ["the run before\n--num_workers 0", "this run\n--loader memory"]
    assert [samples / io for io, _, _ in both.values()] == pytest.approx([SLOW, FAST])
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_a_bar_is_loading_and_training_end_to_end() -> None:
    axes = Figure().subplots()
    draw_bars(axes, {"a": (100.0, 50.0, 40.0)}, samples=10)
    load, train = axes.patches
    assert (load.get_width(), train.get_x(), train.get_width()) == pytest.approx((100, 100, 200))  # milliseconds
    (mark,) = axes.lines
    assert list(mark.get_xdata()) == [250, 250]


def test_flags_that_two_runs_share_are_no_label() -> None:
    assert labels_of([["--seed", "1"], ["--seed", "1"]]) == ["the run before", "this run"]


def test_every_trial_begins_with_a_fresh_iterator_and_a_new_epoch(clock: Clock, tmp_path: Path) -> None:
    epochs = []

    class Observed(SlowLoader):
        def __iter__(self) -> Iterator:
            epochs.append(self.batch_sampler.epoch)
            return super().__iter__()

    def train(loader: Loader) -> None:
        assert sum(1 for _ in loader) == len(loader) > 0, "an iterator that is used twice is empty the second time"
        clock.sleep(FAST)

    loader = Observed(clock, FAST, samples=80)
    benchmark(log_to(tmp_path, 0.05), loader, train)
    first, *others = epochs
    assert first == 0, "the batch that SYNTHETIC repeats"
    assert len(others) == len(set(others)) > 6
    assert loader.batch_sampler.max_steps is None


def test_training_without_communication_is_measured_too(clock: Clock, tmp_path: Path) -> None:
    pace = [SLOW]

    @contextmanager
    def no_sync() -> Iterator[None]:
        pace.append(FAST)
        yield
        pace.pop()

    def train(loader: Loader) -> None:
        for _ in loader:
            clock.sleep(pace[-1])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loader = SlowLoader(clock, FAST, 800)
        log = log_to(tmp_path, 0.1)
        log.utilization, log.mfu = True, lambda speed: speed / 1e6
        benchmark(log, loader, train, no_sync)
    finally:
        dist.destroy_process_group()
    figures = json.loads((tmp_path / "throughput.json").read_text())
    assert figures["SYNTHETIC"]["trials"] == pytest.approx([8 / SLOW] * 3)
    for kind in ("COMPUTE", "BARRIER"):
        assert figures[kind]["trials"] == pytest.approx([8 / FAST] * 3)
    assert figures["mfu"]["SYNTHETIC"] == pytest.approx(8 / SLOW / 1e6)


@pytest.mark.parametrize("sampler_class", [DistributedBatchSampler, ShardSampler])
@pytest.mark.parametrize("samples", [64, 100, 135, 1300])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_can_take_the_steps_of_a_trial(
    sampler_class: type[EpochSampler], samples: int, world_size: int
) -> None:
    samplers = [
        sampler_class(samples, 16 // world_size, rank=rank, num_replicas=world_size, shuffle=True, seed=1)
        for rank in range(world_size)
    ]
    (full_steps,) = {sampler.full_steps for sampler in samplers}
    assert full_steps >= samples // 16 - 1
    for epoch in range(20):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            assert len(sampler) >= full_steps


TRIALS = {"IO": [300, 306, 294], "SYNTHETIC": [100, 102, 98], "FULL": [95, 97, 93]}


@pytest.mark.parametrize(
    ("changed", "loader", "found"),
    [
        ({}, MAP, "Compute-bound: the loader could give 3.0 times as many samples/s"),
        (
            {"SYNTHETIC": [1200, 1210, 1190], "FULL": [299, 298, 300]},
            MemoryLoader,
            "Data-bound: training could process 4.0",
        ),
        ({"FULL": [60, 61, 59]}, MAP, "Poor overlap: together they give 60 samples/s, 60% of the slower part alone"),
        ({"FULL": [61, 390, 734]}, MAP, "Too noisy: the trials of FULL gave 395 +/- 337 samples/s."),
        ({"SYNTHETIC": [15, 100, 185]}, MAP, "Too noisy: the trials of SYNTHETIC gave 100 +/- 85 samples/s."),
        ({"IO": [9000, 2000, 15000]}, MAP, "Compute-bound"),  # the noise of the faster part does not matter
    ],
)
def test_the_diagnosis_says_what_limits_the_run_and_by_how_much(changed: dict, loader: Loader, found: str) -> None:
    measured = {name: Throughput(trials) for name, trials in (TRIALS | changed).items()}
    assert diagnosis(measured, loader).startswith(found)


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (MemoryLoader, "Try --loader device"),
        (MAP, "Try more --num_workers"),
        (BatchLoader, "Try a larger --batch_size"),  # a new loader that says nothing
    ],
)
def test_the_diagnosis_says_what_to_try_next(loader: Loader, advice: str) -> None:
    data_bound = {"IO": [50, 51, 49], "SYNTHETIC": [100, 102, 98], "FULL": [49, 50, 48]}
    assert advice in diagnosis({name: Throughput(trials) for name, trials in data_bound.items()}, loader)


@pytest.mark.parametrize(
    ("workers", "io", "advice"),
    [
        (0, 80, "try --num_workers 1 if a CPU is free, else --loader memory."),
        (0, 200, "try --num_workers 1 if a CPU is free, else a larger --batch_size"),
        (None, 800, "itself, so the times add up: try a larger --batch_size"),
        (8, 80, "give the workers CPUs of their own, or less work: --loader memory."),
    ],
)
def test_with_poor_overlap_it_depends_on_who_loads(workers: int | None, io: float, advice: str) -> None:
    loader = MemoryLoader if workers is None else SimpleNamespace(num_workers=workers)
    poor = {"IO": [io] * 3, "SYNTHETIC": [100.0] * 3, "FULL": [60.0] * 3}
    assert advice in diagnosis({name: Throughput(trials) for name, trials in poor.items()}, loader)


def test_a_trial_takes_about_as_long_as_was_asked_for() -> None:
    tried = []

    def time_of(repeats: int) -> float:
        tried.append(repeats)
        return 0.001 * repeats

    assert repeats_for(1.0, time_of, first=10) == 1000
    assert tried == [10, 20, 40, 80, 160, 320, 640]  # the last one took a third of the time, which is long enough
    assert repeats_for(0.002, time_of, first=10) == 10


def test_the_lesson_prints_table_and_diagnosis(run_script: Script, tmp_path: Path) -> None:
    flags = ["--benchmark", "true", "--benchmark_seconds", 0.05, "--loader", "memory", "--batch_size", 8]
    result = run_script("01_single_gpu/train.py", *flags, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if "+/-" in line][:3] == ["IO", "SYNTHETIC", "FULL"]
    assert any(words in result.stdout for words in ("bound: ", "overlap: ", "Too noisy: "))
    assert "epoch" not in result.stdout
    assert not (tmp_path / "checkpoint.pt").exists()
