"""The diagnosis finds the part that was made slow."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from conftest import REPOSITORY, Script
from lab.launching import load_script
from slow_work import FAST, SLOW, Clock, SlowLoader
from workshop.datasets.shards import SHARDS
from workshop.loaders import Loader
from workshop.loaders.sampler import DistributedBatchSampler
from workshop.loaders.shards import ShardSampler
from workshop.profiling.calibration import repeats_for
from workshop.profiling.throughput import Throughput, benchmark, diagnosis
from workshop.run.logger import LOCK


def measured(clock: Clock, folder: Path, load: float, train: float, samples: int = 800) -> dict:
    def slow_model(loader: Loader) -> None:
        for _ in loader:
            clock.sleep(train)

    benchmark(SlowLoader(clock, load, samples), slow_model, torch.device("cpu"), "map", folder, seconds=0.15)
    return json.loads((folder / "throughput.json").read_text())


@pytest.mark.parametrize("samples", [800, 40])  # a trial is part of an epoch, or many epochs
def test_a_slow_loader_is_found_out(clock: Clock, tmp_path: Path, samples: int, capsys: pytest.CaptureFixture) -> None:
    figures = measured(clock, tmp_path, load=SLOW, train=FAST, samples=samples)
    assert figures["diagnosis"].startswith("Data-bound: ")
    assert figures["IO"]["mean"] == pytest.approx(8 / SLOW)
    assert figures["SYNTHETIC"]["mean"] == pytest.approx(8 / FAST)
    assert figures["FULL"]["mean"] == pytest.approx(8 / (SLOW + FAST))
    assert "Try more --num_workers" in capsys.readouterr().out


def test_a_slow_model_is_found_out(clock: Clock, tmp_path: Path) -> None:
    figures = measured(clock, tmp_path, load=FAST, train=SLOW)
    assert figures["diagnosis"].startswith("Compute-bound: ")
    assert figures["SYNTHETIC"]["mean"] == pytest.approx(8 / SLOW)


def test_work_that_does_not_overlap_is_found_out(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, load=SLOW, train=SLOW)["diagnosis"].startswith("Poor overlap: ")


@pytest.mark.parametrize("steps_per_epoch", [1, 4, 6, 7, 9, 100])
def test_a_cuda_graph_is_recorded_before_anything_is_timed(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_epoch: int
) -> None:
    trained, before = [], []

    def train(batches: Loader) -> None:
        for batch in batches:
            clock.sleep(FAST)
            trained.append(batch)

    def fewest(seconds: float, time_of: Callable, first: int) -> int:
        before.append(len(trained))
        return first

    monkeypatch.setattr("workshop.profiling.throughput.repeats_for", fewest)
    loader = SlowLoader(clock, FAST, samples=8 * steps_per_epoch)
    benchmark(loader, train, torch.device("cpu"), "map", tmp_path, seconds=0.1)
    assert before[0] > load_script(REPOSITORY / "04_mixed_precision").GraphedStep.EAGER_STEPS


SHORT_LAST_BATCH = 8 * 12 + 3
"""samples of an epoch of SlowLoader, whose batches have 8: the last of 13 has 3, and warming up takes 10 steps"""


@pytest.mark.parametrize("steps", [4, 12, 13, 40], ids="trials of {} steps".format)
def test_every_shape_of_a_batch_is_compiled_before_the_trials(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    torch._dynamo.reset()
    compiler, compiled_before = CompileCounter(), []
    double = torch.compile(lambda batch: batch * 2, backend=compiler, dynamic=False)
    shapes = set()

    def train(batches: Loader) -> None:
        for inputs, _ in batches:
            clock.sleep(FAST)
            shapes.add(double(inputs).shape)

    def chosen_steps(seconds: float, time_of: Callable, first: int) -> int:
        compiled_before.append(compiler.frame_count)
        return steps

    monkeypatch.setattr("workshop.profiling.throughput.repeats_for", chosen_steps)
    loader = SlowLoader(clock, FAST, samples=SHORT_LAST_BATCH)
    benchmark(loader, train, torch.device("cpu"), "map", tmp_path, seconds=0.1)
    assert (compiled_before[0], compiler.frame_count) == (1, 1)
    assert shapes == {(8,)}


def test_samples_are_counted_as_they_are_trained_on(clock: Clock, tmp_path: Path) -> None:
    figures = measured(clock, tmp_path, load=SLOW, train=FAST, samples=SHORT_LAST_BATCH)
    assert figures["IO"]["mean"] == pytest.approx(8 / SLOW)
    assert figures["SYNTHETIC"]["mean"] == pytest.approx(8 / FAST)
    assert figures["FULL"]["mean"] == pytest.approx(8 / (SLOW + FAST))


@pytest.mark.parametrize("sampler_class", [DistributedBatchSampler, ShardSampler])
@pytest.mark.parametrize("samples", [64, 100, 135, 1300])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_take_the_same_full_steps_in_every_epoch(
    sampler_class: type[DistributedBatchSampler], samples: int, world_size: int
) -> None:
    batch_size = 16 // world_size
    samplers = [
        sampler_class(samples, batch_size, rank=rank, num_replicas=world_size, shuffle=True, seed=1)
        for rank in range(world_size)
    ]
    (full_steps,) = {sampler.full_steps for sampler in samplers}
    assert full_steps >= samples // 16 - 1
    for epoch in range(20):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            assert len(sampler) >= full_steps
            if sampler_class is ShardSampler:
                of_rank = sampler.shards(sampler.rank)
                assert sum(len(range(shard, samples, SHARDS)) for shard in of_rank) >= full_steps * batch_size
            else:
                assert {len(batch) for batch in list(sampler.batches())[:full_steps]} == {batch_size}


def diagnosis_of(io: float, synthetic: float, full: float, loader: str, spread: float = 0.02) -> str:
    """Of three trials each: the mean, and values above and below it by a share ``spread``."""
    means = {"IO": io, "SYNTHETIC": synthetic, "FULL": full}
    trials = {name: [mean, mean * (1 + spread), mean * (1 - spread)] for name, mean in means.items()}
    return diagnosis({name: Throughput(found) for name, found in trials.items()}, loader)


def test_the_diagnosis_says_by_how_much() -> None:
    assert "could process 4.0 times as many samples/s" in diagnosis_of(io=100, synthetic=400, full=99, loader="memory")
    assert "Try --loader device" in diagnosis_of(io=100, synthetic=400, full=99, loader="memory")
    assert "could give 3.0 times" in diagnosis_of(io=300, synthetic=100, full=95, loader="map")
    assert "60% of the slower part" in diagnosis_of(io=300, synthetic=100, full=60, loader="map")


def test_the_diagnosis_says_which_lesson_makes_the_step_faster() -> None:
    found = diagnosis_of(io=300, synthetic=100, full=95, loader="map")
    assert "try a larger --batch_size. The lesson on mixed precision makes the step itself faster" in found


@pytest.mark.parametrize(
    ("noisy", "trials"), [("FULL", [61, 390, 734]), ("SYNTHETIC", [150, 400, 640])], ids=["both", "training alone"]
)
def test_trials_that_differ_too_much_give_no_diagnosis(noisy: str, trials: list[float]) -> None:
    quiet = {"IO": [9000, 9100, 9050], "SYNTHETIC": [400, 410, 405], "FULL": [395, 400, 390]}
    assert diagnosis({name: Throughput(rates) for name, rates in quiet.items()}, "map").startswith("Compute-bound")
    measured = {name: Throughput(rates) for name, rates in (quiet | {noisy: trials}).items()}
    found = diagnosis(measured, "map")
    assert found.startswith(f"Too noisy: the trials of {noisy} gave {measured[noisy]} samples/s. Other work")
    assert "--benchmark_seconds" in found and "--precision" not in found


def test_noise_of_the_faster_part_does_not_matter() -> None:
    measured = {"IO": [9000, 2000, 15000], "SYNTHETIC": [400, 410, 405], "FULL": [395, 400, 390]}
    found = diagnosis({name: Throughput(rates) for name, rates in measured.items()}, "map")
    assert found.startswith("Compute-bound")


def test_a_trial_takes_about_as_long_as_was_asked_for() -> None:
    tried = []

    def time_of(repeats: int) -> float:
        tried.append(repeats)
        return 0.001 * repeats

    assert repeats_for(1.0, time_of, first=10) == 1000
    assert tried == [10, 20, 40, 80, 160, 320, 640]  # the last one took a third of the time, which is long enough
    assert repeats_for(0.002, time_of, first=10) == 10


def test_a_results_file_that_cannot_be_written_is_one_line(run_script: Script, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("of a run")
    (tmp_path / "throughput.json").mkdir()
    flags = ["--benchmark", "true", "--benchmark_seconds", 0.01, "--loader", "memory", "--batch_size", 8]
    result = run_script("01_single_gpu/train.py", *flags, "--run_dir", tmp_path)
    assert result.status == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert f"cannot write {tmp_path}/throughput.json: Is a directory" in result.stderr


def test_the_lesson_prints_table_and_diagnosis(run_script: Script, tmp_path: Path) -> None:
    flags = ["--benchmark", "true", "--benchmark_seconds", 0.2, "--loader", "memory", "--batch_size", 8]
    result = run_script("01_single_gpu/train.py", *flags, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if "+/-" in line][:3] == ["IO", "SYNTHETIC", "FULL"]
    assert any(words in result.stdout for words in ("bound: ", "overlap: ", "Too noisy: "))
    assert "epoch" not in result.stdout  # no step is logged, no epoch is
    figures = json.loads((tmp_path / "throughput.json").read_text())
    assert figures["IO"]["mean"] > figures["SYNTHETIC"]["mean"]
    assert not (tmp_path / "checkpoint.pt").exists()
