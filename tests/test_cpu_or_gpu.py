"""CPU or GPU?: right results everywhere, wrong ones found out, conclusions that follow from the rows."""

import dataclasses
import functools
import json
import sys
import timeit
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import cpu_or_gpu
import sweep as sweep_module
from backends import Backend, compiled_torch_backend, find_backends, numpy_backend, torch_backend
from computations import EXPERIMENTS
from conclusions import Lead, conclude, leads, sweep_table
from conftest import Script
from crossover_plot import plot
from lab import timing
from lab.tables import format_seconds, format_table
from sweep import Measurement, Sweep, WrongResultError, run_sweep

SCRIPT = "01_single_gpu/experiments/cpu_or_gpu.py"
CPU = torch.device("cpu")
ALL_SWEEPS = [(name, sweep) for name, sweeps in EXPERIMENTS.items() for sweep in sweeps]
SWEEP_NAMES = [f"{name}: {sweep.title}" for name, sweep in ALL_SWEEPS]


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORTEST_BLOCK", 0.0)
    monkeypatch.setattr(sweep_module, "QUICK_SECONDS", 0.0)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sweeps in list(EXPERIMENTS.items()):
        small = [dataclasses.replace(sweep, quick_sizes=sweep.quick_sizes[:2]) for sweep in sweeps]
        monkeypatch.setitem(EXPERIMENTS, name, small)


def fake_accelerator() -> Backend:
    """torch on the CPU, taken for an accelerator: data are copied to it, launches waited for."""
    backend = torch_backend(CPU)
    return dataclasses.replace(backend, device="cuda", put=lambda array: torch.from_numpy(array).clone())


def all_backends() -> list[Backend]:
    """Those of this machine (CuPy and JAX too where they are installed), and the fake accelerator."""
    return [
        *find_backends(torch.accelerator.current_accelerator(check_available=True) or CPU, compiled=False)[0],
        fake_accelerator(),
    ]


# --- the computations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sweep"), ALL_SWEEPS, ids=SWEEP_NAMES)
def test_every_backend_agrees_with_the_reference(name: str, sweep: Sweep) -> None:
    sweep = dataclasses.replace(sweep, quick_sizes=sweep.quick_sizes[:2])
    rows = [row for row in run_sweep(name, sweep, all_backends(), [1, 2], quick=True) if row.size]
    assert {row.size for row in rows} == set(sweep.quick_sizes)
    assert {"numpy", "torch"} <= {row.backend for row in rows}
    assert all(row.relative_error <= sweep.tolerance and row.seconds > 0 and row.spread >= 0 for row in rows)
    assert {row.copied for row in rows if row.device == "cuda"} == {False, True}
    assert not any(row.copied for row in rows if row.device == "cpu")
    threads = {row.threads for row in rows if row.backend == "torch" and row.device == "cpu"}
    assert threads == ({1, 2} if "torch" in sweep.threaded else {1})


@pytest.mark.parametrize(("name", "sweep"), ALL_SWEEPS, ids=SWEEP_NAMES)
def test_a_wrong_result_is_found_out(name: str, sweep: Sweep) -> None:
    def a_little_off(array: torch.Tensor) -> np.ndarray:
        return array.numpy() * np.float32(1.001)

    wrong = dataclasses.replace(torch_backend(CPU), name="wrong", fetch=a_little_off)
    with pytest.raises(WrongResultError, match=r"wrong on cpu.*relative error 1\.0e-03"):
        list(run_sweep(name, sweep, [wrong], [1], quick=True))


def test_not_a_number_and_another_shape_are_wrong() -> None:
    sweep = EXPERIMENTS["elementwise"][0]
    nan = dataclasses.replace(numpy_backend(), fetch=lambda array: array * np.nan)
    with pytest.raises(WrongResultError):
        list(run_sweep("elementwise", sweep, [nan], [1], quick=True))
    short = dataclasses.replace(numpy_backend(), fetch=lambda array: array[:-1])
    with pytest.raises(WrongResultError, match="shape"):
        list(run_sweep("elementwise", sweep, [short], [1], quick=True))


def test_regression_recovers_slope_2_and_intercept_5() -> None:
    sweep = EXPERIMENTS["regression"][0]
    x, y = sweep.draw(np.random.default_rng(0), 50)
    assert x.shape == (50, 2) and y.shape == (50, 1)
    for backend in all_backends():
        found = backend.fetch(sweep.compute(backend, backend.put(x), backend.put(y))).ravel()
        assert found == pytest.approx([2, 5], abs=4 * 0.1 / np.sqrt(50))  # four standard errors
        assert found == pytest.approx(np.polyfit(x[:, 0].astype(float), y.ravel().astype(float), 1), rel=1e-5)
    row = next(run_sweep("regression", sweep, [numpy_backend()], [1], quick=True))
    assert row.note == "found y = {0:.4f} x + {1:.4f}, closed form {0:.4f} x + {1:.4f}".format(*found)


def test_many_variables_are_found_too() -> None:
    sweep = EXPERIMENTS["regression"][1]
    x, y = sweep.draw(np.random.default_rng(0), 20)
    coefficients = sweep.compute(numpy_backend(), x, y).ravel()
    assert x.shape == (10_000, 21)
    assert np.abs(coefficients - np.round(coefficients)).max() < 0.1  # they were drawn whole, noise blurs them
    assert np.round(coefficients).min() >= 1 and np.round(coefficients).max() <= 9


def test_cumulative_sum_is_the_loop() -> None:
    loop, cumulative = EXPERIMENTS["branching"]
    x, other, another = loop.draw(np.random.default_rng(1), 1000)
    assert 0.4 < (other % 2).mean() < 0.6  # both branches are taken
    expected = [x[0].astype(float)]
    for i in range(1, 1000):
        expected.append((x[i] if other[i] % 2 == 0 else another[i]) + expected[-1])
    for sweep in (loop, cumulative):
        assert sweep.compute(numpy_backend(), x, other, another) == pytest.approx(expected, rel=1e-5)


# --- how they are timed ---------------------------------------------------------------------------------------------


def test_threads_are_set_while_measuring_and_put_back() -> None:
    seen = []

    def look(backend: Backend, x: np.ndarray) -> np.ndarray:
        blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        seen.append((torch.get_num_threads(), *blas))
        return x

    sweep = dataclasses.replace(
        EXPERIMENTS["elementwise"][0], compute=look, reference=lambda x: x, quick_sizes=(10,), threaded=("numpy",)
    )
    before = torch.get_num_threads()
    rows = list(run_sweep("elementwise", sweep, [numpy_backend()], [1, 2, 4], quick=True))
    assert [row.threads for row in rows] == [1, 2, 4]
    assert {threads for reading in seen for threads in reading} == {1, 2, 4}
    assert all(len(set(reading)) == 1 for reading in seen)  # torch and BLAS alike
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("cpus", "quick", "expected"),
    [(1, False, [1]), (2, False, [1, 2]), (6, False, [1, 2, 4, 6]), (8, False, [1, 2, 4, 8]), (6, True, [1, 6])],
)
def test_thread_counts(cpus: int, quick: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_or_gpu, "available_cpus", lambda: cpus)
    assert cpu_or_gpu.thread_counts(quick) == expected


def test_an_accelerator_is_waited_for_and_its_copy_counted_only_where_it_says() -> None:
    events = []

    def put(array: np.ndarray) -> torch.Tensor:
        events.append("put")
        return torch.from_numpy(array)

    def wait(array: torch.Tensor) -> torch.Tensor:
        events.append("wait")
        return array

    def compute(backend: Backend, x: torch.Tensor) -> torch.Tensor:
        events.append("compute")
        return x

    sweep = dataclasses.replace(
        EXPERIMENTS["elementwise"][0], compute=compute, reference=lambda x: x, quick_sizes=(10,)
    )
    backend = dataclasses.replace(fake_accelerator(), put=put, wait=wait)
    resident, copied = run_sweep("elementwise", sweep, [backend], [1], quick=True)
    assert (resident.copied, copied.copied) == (False, True)
    calls = 2 + timing.FEWEST_REPEATS  # one to warm up, one to see how long a call takes
    assert " ".join(events) == " ".join(
        ["put wait", *["compute wait"] * calls, "put wait", *["put compute wait"] * calls]
    )


def test_measure_repeats_and_gives_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    durations = iter([7.0, 4.0, 1.0, 2.0, 3.0, 90.0])  # the first one shows how long a call takes
    monkeypatch.setattr(timeit, "Timer", functools.partial(timeit.Timer, timer=lambda: now[0]))

    def run() -> None:
        now[0] += next(durations)

    result = timing.measure(run, min_seconds=100)
    assert (result.seconds, result.spread, result.repeats) == (3.0, 2.0, 5)


def test_what_a_library_cannot_do_is_said_in_the_row() -> None:
    def missing(backend: Backend, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError("no such operation on this device\nlong traceback")

    sweep = dataclasses.replace(EXPERIMENTS["elementwise"][0], compute=missing, quick_sizes=(10,))
    (row,) = run_sweep("elementwise", sweep, [numpy_backend()], [1], quick=True)
    assert row.seconds is None and row.note == "not measured: no such operation on this device"
    loop = EXPERIMENTS["branching"][0]
    jax = dataclasses.replace(numpy_backend(), name="jax")
    (row,) = run_sweep("branching", loop, [jax], [1], quick=True)
    assert row.seconds is None and "in place" in row.note


def test_absent_libraries_are_reported_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "jax", None)
    backends, missing = find_backends(CPU, compiled=False)
    assert [backend.name for backend in backends] == ["numpy", "torch"]
    assert missing["cupy"] == missing["jax"] == "not installed"
    assert "none" in missing["torch on an accelerator"]


def test_torch_compile_without_a_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(NotImplementedError, match=r"torch.compile does not work here \(RuntimeError\)"):
        compiled_torch_backend(CPU)
    assert find_backends(CPU, compiled=True)[1]["torch.compile"] == "torch.compile does not work here (RuntimeError)"


# --- what is said of the rows ---------------------------------------------------------------------------------------


def rows_of(label: dict, times: dict[int, float], sweep: str = "s", unit: str = "elements") -> list[Measurement]:
    """Rows of one backend: seconds by size."""
    label = {"backend": "torch", "device": "cpu", "experiment": "e", "sweep": sweep, "unit": unit} | label
    return [Measurement(size=size, seconds=seconds, spread=0.0, **label) for size, seconds in times.items()]


NUMPY = {"backend": "numpy", "threads": 1}
GPU = {"device": "cuda"}


def test_conclusion_names_the_size_from_which_the_gpu_wins() -> None:
    rows = [
        *rows_of(NUMPY, {100: 1.0, 1000: 2.0, 10_000: 40.0}),
        *rows_of({"threads": 2}, {100: 3.0, 1000: 3.0, 10_000: 20.0}),
        *rows_of(GPU, {100: 5.0, 1000: 5.0, 10_000: 5.0}),
    ]
    assert leads(rows) == [Lead("numpy (1 thread)", 100), Lead("torch on cuda", 10_000)]
    assert conclude(rows) == (
        "numpy (1 thread) is fastest up to 1,000 elements, torch on cuda from 10,000, "
        "4.0 times as fast as torch (2 threads) at 10,000"
    )


def test_conclusion_follows_the_rows_not_the_expectation() -> None:
    rows = [*rows_of(NUMPY, {100: 1.0, 1000: 1.0}), *rows_of(GPU, {100: 0.5, 1000: 3.0})]
    assert conclude(rows) == (
        "torch on cuda is fastest up to 100 elements, numpy (1 thread) from 1,000, "
        "3.0 times as fast as torch on cuda at 1,000"
    )
    assert conclude(rows_of(NUMPY, {100: 1.0})) == "numpy (1 thread) is fastest at every size"


def test_conclusion_says_whether_copying_pays() -> None:
    cpu, gpu = rows_of(NUMPY, {10: 1.0, 100: 10.0, 1000: 100.0}), rows_of(GPU, {10: 0.5, 100: 0.5, 1000: 0.5})
    pays = rows_of(GPU | {"copied": True}, {10: 2.0, 100: 20.0, 1000: 50.0})
    assert conclude(cpu + gpu + pays).endswith("; copying pays from 1,000")
    never = rows_of(GPU | {"copied": True}, {10: 2.0, 100: 20.0, 1000: 200.0})
    assert conclude(cpu + gpu + never).endswith("; copying the data there first does not pay")


def test_a_small_lead_is_noise() -> None:
    one, two = rows_of({"threads": 1}, {10: 1.0, 100: 1.0}), rows_of({"threads": 2}, {10: 0.95, 100: 0.95})
    assert leads(one + two) == [Lead("torch (1 thread)", 10)]
    # When torch takes the lead at 100, two threads of numpy that are no better than the one that lost it do not.
    rows = [
        *rows_of(NUMPY, {10: 1.0, 100: 58.4}),
        *rows_of(NUMPY | {"threads": 2}, {10: 0.98, 100: 57.0}),
        *rows_of({"threads": 1}, {10: 1.4, 100: 52.1}),
    ]
    assert leads(rows) == [Lead("numpy (1 thread)", 10), Lead("torch (1 thread)", 100)]


def test_conclusion_says_the_gain_of_writing_it_anew() -> None:
    rows = [
        *rows_of(NUMPY, {100: 1.0, 1000: 10.0}, sweep="loop"),
        *rows_of(NUMPY, {100: 0.5, 1000: 0.5, 10_000: 1.0}, sweep="scan"),
    ]
    assert conclude(rows).endswith("; at 1,000 elements 'scan' is 20 times as fast as 'loop'")
    other = [*rows_of(NUMPY, {100: 1.0}, sweep="a"), *rows_of(NUMPY, {100: 0.5}, sweep="b", unit="systems")]
    assert "times" not in conclude(other)


def test_rows_without_a_time_are_left_out() -> None:
    absent = Measurement(experiment="e", sweep="s", backend="cupy", note="not measured: not installed")
    assert absent.label == "cupy"
    assert conclude([absent, *rows_of(NUMPY, {100: 1.0})]) == "numpy (1 thread) is fastest at every size"


def test_tables() -> None:
    assert [format_seconds(s) for s in (2.5, 0.25, 0.0125, 1.5e-6, 2e-10)] == [
        "2.50 s",
        "250 ms",
        "12.5 ms",
        "1.50 µs",
        "0.20 ns",
    ]
    assert format_table(("a", "bb"), [("ccc", "1")]) == "a    bb\nccc   1"
    table = sweep_table([*rows_of(NUMPY, {10: 1.0, 1000: 3.0}), *rows_of(GPU, {1000: 2.0})]).splitlines()
    assert table[0].split() == ["elements", "10", "1,000"]
    assert table[1].startswith("numpy (1 thread)") and table[1].count("*") == 1
    assert table[2].split() == ["torch", "on", "cuda", "-", "2.00", "s", "±", "0%*"]


def test_plot_shades_the_crossovers(tmp_path: Path) -> None:
    rows = [
        *rows_of(NUMPY, {100: 1.0, 10_000: 40.0}),
        *(row for n in (1, 2, 4) for row in rows_of({"threads": n}, {100: 3.0, 10_000: 20.0})),
        *rows_of(GPU, {100: 5.0, 10_000: 5.0}),
        *rows_of(GPU | {"copied": True}, {100: 9.0, 10_000: 50.0}),
        *rows_of(NUMPY, {7: 1.0}, sweep="a single size"),
    ]
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# --- the script -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_sizes")
def test_script_writes_table_results_and_plot(run_script: Script, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    flags = ("--experiment", "regression", "--experiment", "chained", "--quick", "true", "--out", out)
    result = run_script(SCRIPT, *flags)
    assert result.status == 0, result.stderr
    assert "regression: fit a line\nsamples " in result.stdout
    assert "numpy (1 thread): found y = 2.0" in result.stdout
    results = json.loads((out / "cpu_or_gpu.json").read_text())
    assert {"date", "command", "hardware", "versions", "cpu_share", "conclusions", "rows"} <= results.keys()
    assert results["versions"]["numpy"] == np.__version__
    rows = [Measurement(**row) for row in results["rows"]]
    for name in ("chained", "regression"):
        of_experiment = [row for row in rows if row.experiment == name]
        assert results["conclusions"][name] == conclude(of_experiment)
        assert f"=> {name}: {results['conclusions'][name]}" in result.stdout
        for sweep in EXPERIMENTS[name]:
            assert {row.size for row in of_experiment if row.sweep == sweep.title} == set(sweep.quick_sizes)
    left_out = [row for row in rows if row.backend == "torch.compile"]
    assert [(row.experiment, row.note) for row in left_out] == [("chained", "not measured: left out by --quick")]
    assert (out / "cpu_or_gpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_sizes")
def test_results_go_to_the_runs_folder_by_default(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--experiment=elementwise", "--quick=true")
    assert result.status == 0, result.stderr
    assert (tmp_path / "runs" / "01_single_gpu" / "cpu_or_gpu" / "cpu_or_gpu.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--experiment", "linear_system"], "no experiment 'linear_system'; did you mean linear_systems?"),
        (["--experiment", "xyz"], "no experiment 'xyz'; known are: branching, chained, elementwise,"),
        ([], "give either --all or --experiment NAME; known are: linear_systems,"),
        (["--all", "--experiment", "chained"], "give either --all or --experiment NAME"),
        (["--all", "--quick", "perhaps"], "--quick: takes true or false, got 'perhaps'"),
        (["--all", "--qick", "true"], "unrecognized arguments: --qick true"),
        (["--all", "--out", "{file}"], "{file}: File exists; name another folder with --out"),
    ],
)
def test_mistakes_are_reported_in_one_line(run_script: Script, tmp_path: Path, flags: list[str], message: str) -> None:
    file = tmp_path / "file"
    file.touch()
    result = run_script(SCRIPT, *(flag.format(file=file) for flag in flags))
    assert (result.status, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and message.format(file=file) in result.stderr


@pytest.mark.usefixtures("small_sizes")
def test_a_busy_machine_is_reported(run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "cpu_share", lambda: 0.5)
    result = run_script(SCRIPT, "--experiment", "branching", "--quick", "true", "--out", tmp_path)
    assert result.status == 0
    assert "warning: at times this process got only 50% of its CPUs' time" in result.stderr
    assert json.loads((tmp_path / "cpu_or_gpu.json").read_text())["cpu_share"] == 0.5


def test_cpu_share_is_a_share() -> None:
    assert 0 < timing.cpu_share() < 1.2
