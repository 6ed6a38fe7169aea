"""The experiments of lesson 01 with little work: right tables, right results, nothing left behind."""

import dataclasses
import json
import re
import shutil
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bandwidth
import cpu_or_gpu
import three_rates
from computations import PROBLEMS
from conftest import REPOSITORY, Script
from cpu_or_gpu import Library, Measurement, pays_at, row_of, sweep, torch_on
from lab.timing import Timing
from sources import generate, pack
from spectra import SpectrumCNN, read_spectra, synthetic_spectra
from whole_batches import batches
from workshop.errors import UserError

FOLDER = "01_single_gpu/experiments"
CPU = torch.device("cpu")


def table_of(folder: Path, name: str) -> dict:
    (file,) = folder.glob(f"*/{name}.json")
    return json.loads(file.read_text())


# What the lesson measures of itself.


def test_the_first_changes_are_compared_line_by_line(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"map": [8, 6, 7], "memory": [1, 1, 2], "digits": [2, 2, 2]}
    runs = []

    def begin(flags: tuple, how: str) -> tuple[str, int]:
        name = "memory" if "memory" in flags else "map" if "--config" in flags else "digits"
        runs.append((name, how))
        return name, (len(runs) - 1) // 6

    def run(words: list, folder: Path) -> str:
        name, trial = begin(tuple(words), "plain")
        return (
            f"step 1/2  load 9.00 ms  compute 9.00 ms\nstep 2/2  load {seconds[name][trial]}.00 ms  compute 2.00 ms\n"
        )

    def line_profile(lesson: Path, *flags: object) -> tuple:
        name, trial = begin(flags, "profiled")
        loading = 2 * seconds[name][trial]  # the profiler slows loading most
        total = loading + 2
        lines = [("for inputs, targets in loader:  # what it is", loading), ("  loss.backward()", 2)]
        return {}, [{"text": text, "percent": 100 * s / total, "seconds": s / 1000, "hits": 1} for text, s in lines]

    monkeypatch.setattr("workshop.hardware.SHORTEST_LOOK", 0.0)
    monkeypatch.setattr("workshop.hardware.OtherWork.cpus", lambda self: 0.0)
    monkeypatch.setattr("lab.launching.run", run)
    monkeypatch.setattr("lab.launching.line_profile", line_profile)
    result = run_script(f"{FOLDER}/first_changes.py", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    assert runs == [(name, how) for name in seconds for how in ("plain", "profiled")] * 3, "alternately"
    table = table_of(tmp_path, "first_changes")
    (_, load, compute, bound, share, _, profiled_share, slower), (*_, faster, _, _), _ = table["rows"]
    assert load == [7, 6, 8]
    assert compute == [2, 2, 2]
    assert bound == [pytest.approx(1 + s / 2) for s in (7, 6, 8)], "the most that a faster loader could gain"
    assert share == [pytest.approx(100 * part) for part in (7 / 9, 6 / 8, 8 / 10)]
    assert profiled_share == [pytest.approx(100 * part) for part in (14 / 16, 12 / 14, 16 / 18)]
    assert slower == [pytest.approx(ratio) for ratio in (16 / 9, 14 / 8, 18 / 10)]
    assert faster == [pytest.approx(ratio) for ratio in (8 / 3, 9 / 4, 10 / 3)], "ratios within a trial"
    assert table_of(tmp_path, "first_changes_lines")["rows"][0] == [
        "`for inputs, targets in loader:`",
        *(pytest.approx(100 * part) for part in (14 / 16, 2 / 4, 4 / 6)),
    ]


@pytest.mark.parametrize(("study", "rows"), [("loaders", 5), ("mnist_loaders", 5), ("worker_counts", 5), ("models", 3)])
def test_each_study_of_throughput_predicts_from_io_and_synthetic(
    study: str, rows: int, run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    speeds = {"IO": 300.0, "SYNTHETIC": 600.0, "FULL": 240.0}

    def train(lesson: Path, *flags: object) -> dict:
        assert flags[flags.index("--benchmark") + 1] == "true"
        return {kind: {"trials": [speed - 1, speed, speed + 1]} for kind, speed in speeds.items()}

    monkeypatch.setattr("lab.launching.train", train)
    result = run_script(f"{FOLDER}/throughput.py", study, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    found = table_of(tmp_path, study)["rows"]
    assert len(found) >= rows
    assert [mean for mean, _ in found[0][1:4]] == [300, 600, 240]  # of nine trials
    assert found[0][4:] == [pytest.approx(200), pytest.approx(1.2), 300, 0.8]


def test_a_loader_that_fails_costs_only_its_row(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(lesson: Path, *flags: object) -> dict:
        if "shards" in flags:
            raise UserError("no driver")
        return {kind: {"trials": [99, 100, 101]} for kind in ("IO", "SYNTHETIC", "FULL")}

    monkeypatch.setattr("lab.launching.train", train)
    result = run_script(f"{FOLDER}/throughput.py", "loaders", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    assert "`shards`: not measured: no driver" in result.stdout
    table = table_of(tmp_path, "loaders")
    names = [row[0] for row in table["rows"]]
    assert "`memory`" in names and "`shards`" not in names and "unfinished" not in table


def test_a_study_that_there_is_not_is_one_line(run_script: Script) -> None:
    assert "did you mean models?" in run_script(f"{FOLDER}/throughput.py", "model").error


def test_slow_files_arrive_late_and_their_steps_are_plotted(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ("--num_workers", 1, "--limit_train", 128, "--limit_val", 8, "--batch_size", 8, "--trace", "true")
    result = run_script(f"{FOLDER}/slow_files.py", *flags, "--run_dir", tmp_path / "run")
    assert result.status == 0, result.stderr
    (epoch,) = json.loads((tmp_path / "run/summary.json").read_text())["epochs"]
    assert epoch["seconds"] >= 128 * 0.002

    def train(*_: Any, keep_in: Path, **__: Any) -> None:  # noqa: ANN401
        shutil.copy(tmp_path / "run/rank0.pt.trace.json.gz", keep_in)

    monkeypatch.setattr("lab.plots.train", train)
    result = run_script(f"{FOLDER}/loading_timelines.py", "--rounds", 1, WORKSHOP_RESULTS=str(tmp_path / "results"))
    assert result.status == 0, result.stderr
    rows = table_of(tmp_path / "results", "loading_timelines")["rows"]
    assert [row[0] for row in rows] == ["0", "1", "4"]
    assert all(step > data > 0 for _, step, data in rows)
    assert list((tmp_path / "results").glob("*/loading_timelines.png"))


# Disk and memory.


def test_the_same_samples_are_read_from_shards_and_from_files(run_script: Script, tmp_path: Path) -> None:
    script, data = f"{FOLDER}/sequential_reads.py", tmp_path / "data"
    assert "python ../data/prepare.py mnist --shards" in run_script(script, "--data_dir", data).error
    generate("mnist", data, train_samples=640, val_samples=64)
    pack("mnist", data)
    before = sorted(path.name for path in data.iterdir())
    result = run_script(script, "--data_dir", data, WORKSHOP_RESULTS=str(tmp_path / "results"))
    assert result.status == 0, result.stderr
    (_, shards, fast), (_, files, slow) = table_of(tmp_path / "results", "sequential_reads")["rows"]
    assert (shards, files) == (8, 640 * 8 / 32)
    assert fast > 0 and slow > 0
    assert sorted(path.name for path in data.iterdir()) == before, "the single files are gone"


def test_the_table_of_bandwidths_has_every_path(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [*bandwidth.measure_disk(tmp_path, 2**20, seconds=10), *bandwidth.measure_memory(2**20, seconds=0)]
    rows += bandwidth.measure_device(CPU, 2**20, seconds=0)
    paths = [row[0] for row in rows]
    assert paths[:4] == [
        "disk, sequential write",
        "disk, sequential read",
        "disk, random 4 KiB read",
        "memory copy, 1 thread",
    ]
    assert paths[-5:] == list(bandwidth.DEVICE_PATHS)
    for _, counted, speed, hours in rows[:-5]:
        assert counted in ("written", "read", "read + written")
        assert speed * hours == pytest.approx(1e6 / 3600)
    assert list(tmp_path.iterdir()) == [], "the test file is gone"
    assert bandwidth.row_of("a path", "copied", 3 * 10**9, 0.1)[2:] == [
        pytest.approx(30),
        pytest.approx(9.26, abs=0.01),
    ]


def test_a_slow_disk_is_stopped_in_time(tmp_path: Path) -> None:
    assert bandwidth.until_done("a path", "read", lambda: 4096, seconds=0.01)[2] > 0
    moved = iter([100, 100, 0])
    assert bandwidth.until_done("a path", "read", lambda: next(moved), seconds=60)[1] == "read"


def test_a_folder_that_cannot_be_written_to_is_one_line() -> None:
    with pytest.raises(UserError, match=r"cannot write .* to /proc"):
        bandwidth.measure_disk(Path("/proc"), 2**20, seconds=1)


# CPU or GPU?


def fake_accelerator() -> Library:
    """torch on the CPU, taken for an accelerator: data are copied to it."""
    put = lambda array: torch.from_numpy(array).clone()  # noqa: E731
    return dataclasses.replace(torch_on(CPU), name="torch on fake", accelerator=True, put=put)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.timing.SHORTEST_BLOCK", 0.0)
    monkeypatch.setattr(cpu_or_gpu, "SECONDS", 0.0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_library_agrees_with_the_reference(name: str, short: None) -> None:
    problem = dataclasses.replace(PROBLEMS[name], sizes=PROBLEMS[name].sizes[:2])
    measured = list(sweep(problem, False, [*cpu_or_gpu.libraries(), fake_accelerator()]))
    assert {one.size for one in measured} == set(problem.sizes)
    assert {"numpy, 1 thread", "torch, 1 thread", "torch on fake", "torch on fake, copy counted"} <= {
        m.label for m in measured
    }
    row = row_of(problem, measured)
    assert row[0] == problem.title and len(row) == 6


def test_a_wrong_result_is_found_out(short: None) -> None:
    wrong = dataclasses.replace(torch_on(CPU), name="wrong", fetch=lambda array: array.numpy() * np.float32(1.001))
    with pytest.raises(AssertionError, match=r"wrong: .*error 1\.0e-03"):
        list(sweep(PROBLEMS["elementwise"], True, [wrong]))


def test_gradient_descent_recovers_slope_2_and_intercept_5() -> None:
    x, y = PROBLEMS["line"].draw(np.random.default_rng(0), 50)
    found = PROBLEMS["line"].compute(np, x, y).ravel()
    assert found == pytest.approx([2, 5], abs=4 * 0.1 / np.sqrt(50))  # four standard errors
    x, y = PROBLEMS["variables"].draw(np.random.default_rng(0), 20)
    coefficients = PROBLEMS["variables"].compute(np, x, y).ravel()
    assert np.abs(coefficients - np.round(coefficients)).max() < 0.1, "they were drawn whole, noise blurs them"


def test_the_cumulative_sum_is_the_loop() -> None:
    inputs = PROBLEMS["branching"].draw(np.random.default_rng(1), 1000)
    assert 0.4 < (inputs[1] % 2).mean() < 0.6, "both branches are taken"
    loop, whole = (PROBLEMS[name].compute(np, *inputs) for name in ("branching", "cumulative_sum"))
    assert loop == pytest.approx(whole, rel=1e-4)


def test_more_threads_pay_only_where_the_lead_is_clear() -> None:
    times = {100: (1.0, 2.0, 0.0), 1000: (1.0, 0.85, 0.4), 10_000: (1.0, 0.95, 0.0), 100_000: (1.0, 0.5, 0.1)}
    measured = [
        Measurement(size=size, label=f"{threads}", threads=threads, timing=Timing(seconds, spread, 3))
        for size, (one, two, spread) in times.items()
        for threads, seconds in ((1, one), (2, two))
    ]
    assert pays_at(measured, lambda m: m.threads == 2) == "100,000", "slower; overlapping ranges; a small lead; clear"


def test_the_script_stores_table_and_plot(run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lab.timing.SHORTEST_BLOCK", 0.0)
    monkeypatch.setattr("lab.timing.cpu_share", lambda: 1.0)
    monkeypatch.setitem(PROBLEMS, "line", dataclasses.replace(PROBLEMS["line"], sizes=(50, 100, 1_000_000)))
    flags = ("--quick", "true", "--problem", "line", "--problem", "many_systems")
    monkeypatch.setitem(PROBLEMS, "many_systems", dataclasses.replace(PROBLEMS["many_systems"], sizes=(10, 20, 10**6)))
    result = run_script(f"{FOLDER}/cpu_or_gpu.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    rows = table_of(tmp_path, "cpu_or_gpu")["rows"]
    assert [row[0] for row in rows] == ["fit a line", "many 10 x 10 systems"]
    assert rows[0][1].startswith("50 samples: ") and rows[0][2].startswith("100 samples: ")
    assert list(tmp_path.glob("*/cpu_or_gpu.png"))


def test_every_experiment_says_what_one_should_see() -> None:
    for script in (REPOSITORY / FOLDER).glob("*.py"):
        text = script.read_text()
        assert "__main__" not in text or "You should see" in text or script.name == "front_figure.py"


def test_whole_batches_have_every_sample_once_and_another_order_in_each_epoch() -> None:
    inputs = torch.arange(10.0)[:, None]
    orders = []
    for epoch in range(2):
        shown = list(batches(inputs, torch.arange(10), 4, epoch, augment=lambda batch: batch + 1))
        assert [len(targets) for _, targets in shown] == [4, 4, 2]
        assert all(torch.equal(samples[:, 0], targets + 1.0) for samples, targets in shown)
        orders.append(torch.cat([targets for _, targets in shown]).tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    assert orders[0] != orders[1]


def test_whole_batches_of_several_ranks_are_disjoint_and_equally_many() -> None:
    inputs = torch.arange(11.0)[:, None]
    ranks = [torch.cat([y for _, y in batches(inputs, torch.arange(11), 2, 0, rank=r, world_size=3)]) for r in range(3)]
    assert [len(rank) for rank in ranks] == [3, 3, 3]
    assert len(set(torch.cat(ranks).tolist())) == 9


def test_the_example_for_spectra_learns_is_resumed_and_names_a_missing_array(
    run_script: Script, tmp_path: Path
) -> None:
    def train(*flags: object) -> list[float]:
        run = run_script(f"{FOLDER}/spectra.py", "--run_dir", tmp_path / "run", "--limit_train", 30 * 64 + 1, *flags)
        assert run.status == 0, run.stderr
        return [epoch["val_loss"] for epoch in json.loads((tmp_path / "run/summary.json").read_text())["epochs"]]

    losses = train("--epochs", 3)
    assert losses[-1] < 0.5, "1 is what guessing gives"
    assert train("--epochs", 1) == losses[:1]
    assert train("--epochs", 3, "--resume", "true") == losses

    flux, good, target = synthetic_spectra(40)
    changed = np.where(good, flux, np.nan)
    np.savez(tmp_path / "mine.npz", flux=changed, good=good, target=target)
    inputs, targets = read_spectra(tmp_path / "mine.npz")
    assert inputs.shape == (40, 2, flux.shape[1]) and torch.isfinite(inputs).all(), "missing values are set to 0"
    assert torch.equal(targets, torch.from_numpy(target).float())
    np.savez(tmp_path / "cgs.npz", flux=1e-17 * changed, good=good, target=target)
    assert torch.allclose(read_spectra(tmp_path / "cgs.npz")[0], inputs, atol=1e-5), (
        "the unit of the flux does not matter"
    )
    kelvin = SpectrumCNN(flux.shape[1], 5000 + 1000 * targets)
    assert 4000 < kelvin(inputs).mean() < 6000, "the first predictions are in the unit of the targets"
    np.savez(tmp_path / "nan.npz", flux=flux, good=good, target=np.where(target > 0.2, target, np.nan))
    with pytest.raises(UserError, match="targets are not finite"):
        read_spectra(tmp_path / "nan.npz")
    np.savez(tmp_path / "less.npz", flux=flux, target=target)
    with pytest.raises(UserError, match="no array good"):
        read_spectra(tmp_path / "less.npz")


def test_three_rates_count_what_comes_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(three_rates, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def step(batch: int) -> None:
        clock[0] += 5.0 if batch < 10 else 0.02  # the first steps are slow

    assert three_rates.rate(range(110), step) == pytest.approx(50)
    assert three_rates.rate(repeat(10), step, steps=7) == pytest.approx(50)
    with pytest.raises(ValueError, match="fewer than 110 batches"):
        three_rates.rate(range(100), step)


def test_the_lines_to_paste_run_with_nothing_else_and_with_few_batches(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "01_single_gpu" / "own_script.md").read_text()
    section = page.partition("## Measure without the package")[2]
    imports, functions, call = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:3]
    names: dict = {"loader": [torch.ones(2, 3)] * 40, "device": "cpu"}
    exec(imports + functions, names)
    with pytest.raises(ValueError, match="fewer than 110 batches"):
        exec(call, names)
    few = re.search(r"`(three_rates\(.*, steps=30\))`", section)
    assert few
    exec(few[1], names)
    assert len(re.findall(r"^IO \S+  SYNTHETIC \S+  FULL \S+ batches/s$", capsys.readouterr().out, re.MULTILINE)) == 3
