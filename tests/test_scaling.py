"""The scaling study: which runs it takes, what follows from their figures, and how it reports mistakes."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import ranks_of_a_job
from conftest import Script
from lab import launching, render, render_scaling
from lab.process_group import process_group
from scaling_study import KINDS, Setting, diagnosis, full_over_compute, plot, rows, scaling_table, settings
from slow_work import FAST, SLOW, Clock, SlowLoader
from workshop.profiling.throughput import Throughput, benchmark

ONE, TWO, FOUR = Setting(1, 64), Setting(2, 64), Setting(4, 64)
MEASURED = {
    ONE: {"IO": [1000, 1000], "SYNTHETIC": [100, 100], "FULL": [90, 110], "COMPUTE": [100, 100]},
    TWO: {"IO": [2000, 2000], "SYNTHETIC": [144, 76], "FULL": [150, 154], "COMPUTE": [200, 154]},
    FOUR: {"IO": [4000, 4000], "SYNTHETIC": [270, 90], "FULL": [250, 270], "COMPUTE": [300, 300]},
}
for setting, in_step in {ONE: [100, 100], TWO: [152, 78], FOUR: [285, 285]}.items():
    MEASURED[setting]["BARRIER"] = in_step

CPU = torch.device("cpu")


@pytest.fixture
def scale(run_script: Script) -> Script:
    return partial(run_script, "03_ddp/experiments/scaling.py")


def test_settings_keep_what_each_scaling_keeps() -> None:
    found = settings(max_ranks=9, batch_size=64, global_batch_size=96)
    assert [(s.ranks, s.batch_size) for s in found["weak"]] == [(1, 64), (2, 64), (4, 64), (8, 64)]
    assert [(s.ranks, s.batch_size) for s in found["strong"]] == [(1, 96), (2, 48), (4, 24), (8, 12)]
    assert [s.ranks for s in settings(8, 64, global_batch_size=6)["strong"]] == [1, 2]
    shared = settings(1, 64, 64)
    assert shared["weak"] == shared["strong"]


def test_the_ratio_is_of_pairs_of_trials_of_the_same_ranks() -> None:
    one, two, four = rows("weak", [ONE, TWO, FOUR], MEASURED)
    assert (one["batch_size"], two["ranks"], four["IO"]["mean"]) == (64, 2, 4000)
    # In pairs: a pace that changes from one trial to the next cancels out.
    assert two["full_over_compute"] == {"median": pytest.approx(0.875), "lowest": 0.75, "highest": 1.0, "pairs": 2}
    assert full_over_compute(four).highest == pytest.approx(0.9)
    assert str(full_over_compute(two)) == "88%, from 75% to 100%"


def test_the_diagnosis_says_it_in_words() -> None:
    found = rows("weak", [ONE, TWO], MEASURED)
    assert diagnosis(found) == (
        "Weak scaling, 2 ranks: with communication the ranks reach 88% of their throughput without it (the median of 2 "
        "pairs of trials, which range from 75% to 100%). The range includes 100%, so the cost of communication is not "
        "larger than the noise."
    )
    assert diagnosis(rows("weak", [ONE, FOUR], MEASURED)).endswith("which range from 83% to 90%).")
    assert "only one rank" in diagnosis(found[:1])
    found[-1]["FULL"] = Throughput([61.0, 390.0, 734.0]).to_dict()
    assert (
        "too noisy for a diagnosis, the trials of FULL gave 395 +/- 337 samples/s. Other work runs here"
        in diagnosis(found)
    )
    found = rows("weak", [ONE, TWO], MEASURED)
    assert scaling_table(found).splitlines()[2].split()[:3] == ["weak", "2", "64"]
    assert scaling_table(found).splitlines()[2].split()[-3:] == ["88%", "75%", "100%"]


def test_the_plot_shows_every_line(tmp_path: Path) -> None:
    found = [row for kind in ("weak", "strong") for row in rows(kind, [ONE, TWO, FOUR], MEASURED)]
    plot(found, tmp_path / "plot.png")
    figure = imread(tmp_path / "plot.png")
    colours = {tuple(pixel) for pixel in (figure[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    for red_green_blue in ((127, 127, 127), (44, 160, 44), (214, 39, 40)):
        assert red_green_blue in colours


def test_compute_is_measured_without_communication(clock: Clock, tmp_path: Path) -> None:
    """Training that is slow only while it communicates is fast in the rows COMPUTE and BARRIER, and only there."""
    pace = [SLOW]

    @contextmanager
    def no_sync() -> Iterator[None]:
        pace.append(FAST)
        yield
        pace.pop()

    def train(loader: SlowLoader) -> None:
        for _ in loader:
            clock.sleep(pace[-1])

    with process_group():
        benchmark(SlowLoader(clock, FAST, 800), train, CPU, "map", tmp_path, seconds=0.1, no_sync=no_sync)
    results = json.loads((tmp_path / "throughput.json").read_text())
    assert results["SYNTHETIC"]["trials"] == pytest.approx([8 / SLOW] * 3)
    for kind in ("COMPUTE", "BARRIER"):
        assert results[kind]["trials"] == pytest.approx([8 / FAST] * 3)


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (
            "W1 noise\nerror: --lr must be above 0, got 0\nTraceback (most recent call last):\nX: y\n",
            "--lr must be above 0",
        ),
        ("Traceback:\n[rank1]: RuntimeError: boom\n[rank1]: more\nE1 failed\n", "RuntimeError: boom"),
        ("torch.distributed.DistNetworkError: port in use\n", "torch.distributed.DistNetworkError: port in use"),
        ("srun: something\nsrun: the last word\n\n", "srun: the last word"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failed_launch_is_one_line(stderr: str, expected: str) -> None:
    assert launching.reason(stderr).startswith(expected)
    assert "\n" not in launching.reason(stderr)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of a job on two nodes."""
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).write_text("#!/bin/sh\nprintf 'first\\nsecond\\n'\n")
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for name, value in {"SLURM_JOB_ID": "10007", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "PATH": path}.items():
        monkeypatch.setenv(name, value)


def test_slurm_starts_as_few_nodes_as_hold_the_ranks(job: None) -> None:
    assert ranks_of_a_job.launcher(2)[2:5] == ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2"]
    assert ranks_of_a_job.launcher(8)[2:5] == ["--nodes=2", "--ntasks=8", "--ntasks-per-node=4"]


def test_ranks_of_slurm_get_an_address_unless_the_job_has_one(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--export=ALL,MASTER_ADDR=first,MASTER_PORT=20007" in ranks_of_a_job.launcher(2)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    assert "MASTER_ADDR" not in " ".join(ranks_of_a_job.launcher(2))


def test_each_setting_is_measured_once_a_round(monkeypatch: pytest.MonkeyPatch, scale: Script, tmp_path: Path) -> None:
    """The whole command, with launches that answer at once."""
    started = []

    def answer(command: list, folder: Path, *, out: Path, threads: int, flag: str = "--out") -> dict:
        script = next(word for word in command if str(word).endswith(".py"))
        started.append((next(word for word in command if "nproc" in word), script, threads))
        ranks = int(started[-1][0].split("=")[1])
        return {kind: {"trials": [100.0 * ranks] * 3} for kind in KINDS}

    monkeypatch.setattr(launching, "run_and_read", answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = scale("--max_ranks", 2, "--rounds", 2, "--out", tmp_path)
    assert result.status == 0, result.stderr
    launches = [start for start, script, _ in started if script == "train.py"]
    assert launches == 2 * ["--nproc-per-node=1", "--nproc-per-node=2", "--nproc-per-node=2"]
    assert len(started) == len(launches)
    assert {threads for _, _, threads in started} == {1}
    results = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["scaling"], row["ranks"], row["batch_size"]) for row in results["rows"]] == [
        ("weak", 1, 64),
        ("weak", 2, 64),
        ("strong", 1, 64),
        ("strong", 2, 32),
    ]
    assert [row["full_over_compute"]["median"] for row in results["rows"]] == [1, 1, 1, 1]
    assert results["rows"][0]["full_over_compute"]["pairs"] == 6
    assert len(results["rows"][0]["FULL"]["trials"]) == 6
    assert results["gradient_bytes"] == sum(results["bucket_bytes"]) == 4 * 1199882
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_with_fewer_tasks_than_gpus_is_reported(
    tasks: int, job: None, monkeypatch: pytest.MonkeyPatch, scale: Script, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launching, "run_and_read", lambda *_, **__: {kind: {"trials": [1.0] * 3} for kind in KINDS})
    result = scale("--quick", "true", "--out", tmp_path, SLURM_NTASKS=str(tasks), SLURM_NNODES="1")
    assert result.status == 0, result.stderr
    assert ("warning: there are 2 GPUs, but this job has 1 task(s), one for" in result.stderr) == (tasks == 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_ranks", 0], "--max_ranks must be at least 1, got 0"),
        (["--seconds", "soon"], "--seconds: invalid float value: 'soon'"),
        (["--quick", "maybe"], "takes true or false, got 'maybe'"),
        (["--loadr", "map"], "unknown flag --loadr; did you mean --loader?"),
        (["--sync_gradients", "false"], "--sync_gradients is set by this script itself"),
        (["--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["--max_ranks", 1, "--data_dir", "/nowhere"], "to prepare mnist run"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(scale: Script, tmp_path: Path, flags: list, message: str) -> None:
    result = scale("--out", tmp_path, *flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_figures_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows("weak", [ONE, TWO], MEASURED)
    about = {"date": "today", "command": "this", "hardware": {"cpus_available": 2, "cpu": "X"}}
    about["hardware"] |= {"cpu_instructions": "AVX9"}
    about["versions"] = {"torch": "1", "python": "3"}
    all_results = {
        "scaling": about
        | {"rows": found, "threads_per_rank": 1, "diagnoses": {"weak": "So it is."}, "bucket_bytes": [4, 4]},
        "allreduce": about
        | {"world_size": 2, "backend": "gloo", "alpha": 0.02, "beta": 1e-9}
        | {"rows": [{"bytes": 4096, "seconds": 0.001, "spread": 0.0005, "bus_gb_per_second": 0.004}]},
    }
    monkeypatch.setattr(render_scaling, "load", lambda experiment, machine=None: all_results.get(experiment))
    monkeypatch.setattr(render, "gpu_machine", lambda experiment: None)
    assert "| AVX9 | weak | 2 | 64 | 152 ± 3 | 177 ± 33 | 88% | 75% to 100% |" in render_scaling.scaling()
    assert render_scaling.scaling_diagnosis("weak").startswith("Weak scaling, 2 ranks: ")
    assert "| 4 | 1.00 | 0.50 | 0.004 |" in render_scaling.allreduce()
    step, all_reduces = 128 / 177, 2 * (0.04 + 4e-9)
    assert f"| {step / (step + all_reduces):.0%} |" in render_scaling.predicted_here()
    assert "python lab/measure.py compare" in render_scaling.compare()
