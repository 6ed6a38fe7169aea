"""The experiments of lesson 03 with little work: what they count, fit and predict is what the pages say."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import alpha_beta
import large_batches
import nccl_backends
import quick_python
import scaling
from alpha_beta import Network
from conftest import REPOSITORY, Script
from ranks import torchrun
from workshop.errors import UserError

LESSON = REPOSITORY / "03_ddp"
FOLDER = "03_ddp/experiments"
OUTPUTS = REPOSITORY / "results" / "example_output"


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which experiments store their tables; they start Python quickly."""
    monkeypatch.setenv("WORKSHOP_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr("lab.launching.PYTHON", str(quick_python.commands() / "python"))
    return tmp_path / "results"


def table(folder: Path, name: str) -> dict:
    """A stored table."""
    (file,) = folder.glob(f"*/{name}.json")
    return json.loads(file.read_text())


def shown(name: str) -> str:
    """An output that a page shows, without the command above it."""
    return (OUTPUTS / f"03_ddp_{name}.txt").read_text().partition("\n")[2]


# The alpha-beta model.


def test_the_model_of_an_all_reduce() -> None:
    network = Network(alpha=1e-3, beta=1e-9)
    assert network.all_reduce_seconds(1e6, 2) == pytest.approx(2 * 1e-3 + 1e-3)
    assert network.all_reduce_seconds(0, 1) == 0
    assert alpha_beta.bus_bandwidth_factor(2) == 1
    for ranks in (2, 8):
        times = [(nbytes, network.all_reduce_seconds(nbytes, ranks)) for nbytes in (4e3, 1e6, 64e6)]
        found = alpha_beta.fit(times, ranks)
        assert (found.alpha, found.beta) == pytest.approx((network.alpha, network.beta))
    assert alpha_beta.fit([(1e3, 1e-3), (1e6, 1e-3 - 1e-9)], 2).beta == 0  # no time is negative
    assert alpha_beta.fit([(1e3, 1e-9), (1e6, 1e-3)], 2).alpha == 0


def test_efficiency_with_and_without_overlap() -> None:
    network = Network(alpha=0, beta=1e-9)

    def efficiency(buckets: int, *, overlap: bool) -> float:
        return alpha_beta.efficiency(1.0, 0.3e9, buckets, network, 2, overlap)  # 0.3 s for all gradients

    assert efficiency(1, overlap=False) == efficiency(1, overlap=True) == pytest.approx(1 / 1.3)
    assert efficiency(3, overlap=False) == pytest.approx(1 / 1.3)
    assert efficiency(3, overlap=True) == pytest.approx(1 / 1.1)  # only the last bucket


def test_the_prediction_is_the_one_on_the_page(run_script: Script) -> None:
    result = run_script(f"{FOLDER}/alpha_beta.py")
    assert result.stdout == shown("alpha_beta")
    for (gpus, batch_size), published in alpha_beta.PUBLISHED.items():
        none, full = alpha_beta.published_efficiency(Network(6e-6, 1 / 25e9), gpus, batch_size)
        assert none < published < full
    assert "--gb_per_second" in run_script(f"{FOLDER}/alpha_beta.py", "--gb_per_second", 0).error


def test_all_reduces_are_timed_and_fitted(stored: Path, run_script: Script) -> None:
    flags = ("--min_kib", 4, "--max_mib", 0.0625, "--seconds", 0.01)
    result = torchrun(2, "experiments/allreduce.py", *flags, cwd=LESSON)
    assert result.status == 0, result.stderr
    assert result.stdout.count("All-reduce by size") == 1
    assert [row[0] for row in table(stored, "allreduce")["rows"]] == ["4", "16", "64"]
    assert all(cell > 0 for row in table(stored, "allreduce")["rows"] for cell in row[1:])
    assert list(stored.glob("*/allreduce.png"))
    assert table(stored, "allreduce_fit")["rows"][0][1] >= 0
    assert "torchrun --nproc-per-node 2" in run_script(f"{FOLDER}/allreduce.py").error


# Scaling.


def test_the_configurations_of_a_scaling_study() -> None:
    found = [(s.scaling, s.ranks, s.batch_size) for s in scaling.settings(6, 64)]
    assert found == [("weak", 1, 64), ("weak", 2, 64), ("weak", 4, 64), ("strong", 2, 32), ("strong", 4, 16)]
    assert [s.ranks for s in scaling.settings(4, 6) if s.scaling == "strong"] == [2]  # four ranks cannot share six


def test_srun_starts_the_ranks_of_a_job_and_torchrun_those_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--nproc-per-node=2" in scaling.launcher(2)
    monkeypatch.setattr(scaling, "in_slurm", lambda: True)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    for ranks, nodes, per_node in ((1, 1, 1), (4, 1, 4), (8, 2, 4)):
        expected = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={per_node}"]
        assert scaling.launcher(ranks)[2:5] == expected


def test_efficiency_and_overhead_of_a_study(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    started = []

    def train(lesson: Path, *flags: object, start: list[str], threads: int, **_: object) -> dict:
        words = list(map(str, flags))
        started.append((words, threads))
        ranks = next((n for n in (1, 2) if f"--nproc-per-node={n}" in start), 0)
        full = [100.0, 110.0, 120.0] if ranks == 1 else [150.0, 165.0, 180.0]
        return {kind: {"trials": [1.25 * x if kind == "COMPUTE" else x for x in full]} for kind in scaling.KINDS}

    monkeypatch.setattr(scaling, "train", train)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--max_ranks", "2", "--rounds", "1", "--limit_train", "640"])
    scaling.main()
    found = table(stored, "scaling")
    rows = {(row[0], row[1]): dict(zip(found["columns"], row, strict=True)) for row in found["rows"]}
    assert rows["weak", 1]["efficiency"] == [1, 1, 1]
    assert rows["weak", 2]["efficiency"] == rows["strong", 2]["efficiency"] == pytest.approx([0.75, 0.75, 0.75])
    assert rows["strong", 2]["overhead"] == pytest.approx([0.2, 0.2, 0.2])
    assert list(stored.glob("*/scaling.png"))
    assert all(words[-3:] == ["64", "--benchmark", "true"] or words[-3] == "32" for words, _ in started)
    assert all("--limit_train" in words and threads == 1 for words, threads in started)  # the CPUs of others are theirs
    assert "Weak and strong scaling" in capsys.readouterr().out


def test_one_command_measures_scaling(stored: Path, run_script: Script) -> None:
    flags = ("--batch_size", 8, "--benchmark_seconds", 0.01, "--limit_train", 160, "--rounds", 1, "--max_ranks", 2)
    result = run_script(f"{FOLDER}/scaling.py", *flags)
    assert result.status == 0, result.stderr
    assert len(table(stored, "scaling")["rows"]) == 3


# Time lines.


def test_a_step_of_two_ranks_and_the_buckets_on_time_lines(stored: Path, run_script: Script) -> None:
    result = run_script(f"{FOLDER}/ddp_step.py", "--model", "cifar_cnn", "--batch_size", 4)
    assert result.status == 0, result.stderr
    assert [row[0] for row in table(stored, "ddp_step")["rows"]] == ["0", "1"]
    assert all(min(row[1:]) > 0 for row in table(stored, "ddp_step")["rows"])
    result = run_script(f"{FOLDER}/bucket_timelines.py", "--rounds", 1, "--model", "cifar_cnn")
    assert result.status == 0, result.stderr
    assert len(table(stored, "bucket_timelines")["rows"]) == 3
    assert {file.stem for file in stored.glob("*/*.png")} == {"ddp_step", "bucket_timelines"}


# What hangs, and what is forgotten.


def test_the_flight_recorder_shows_where_the_ranks_differ(user_environment: dict[str, str], tmp_path: Path) -> None:
    script = "experiments/flight_recorder.py"
    result = torchrun(2, script, "--timeout", 5, cwd=LESSON, environment=user_environment)
    assert result.status == 0, result.stderr
    said, _, table = result.stdout.partition("written to")[0].partition("\n")
    # Both ranks wait equally long: the one that gives up first closes the connection of the other.
    assert re.match("rank 0 has given up: (Timed out waiting 5000ms|Connection closed by peer)", said)
    assert table == shown("flight_recorder").partition("written to")[0].partition("\n")[2]

    folder = tmp_path / "runs/03_ddp/flight_recorder"
    compare = "from torch.distributed.flight_recorder.fr_trace import main; main(['--prefix', 'rank_', {!r}])"
    command = [sys.executable, "-c", compare.format(str(folder))]
    compared = subprocess.run(command, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stderr
    page = (LESSON / "experiments/hangs.md").read_text()
    (block,) = re.findall(r"```text\n(Collective sequence number.*?)\n```", page, re.DOTALL)
    for line in block.splitlines():
        assert line.partition(" at ...")[0].strip() in compared.stdout + compared.stderr
        if place := line.partition(" at .../")[2]:
            assert place in compared.stdout + compared.stderr


@pytest.mark.parametrize(("flags", "name"), [([], "unused"), (["--find"], "found_unused")])
def test_an_unused_parameter_is_not_averaged_unless_ddp_looks_for_it(flags: list[str], name: str) -> None:
    result = torchrun(2, "experiments/unused_parameters.py", *flags, cwd=LESSON)
    assert result.stdout == shown(name)


# Large batches and options.


def summary(batch: int, losses: list[float]) -> dict:
    """What a run leaves behind."""
    return {
        "global_batch_size": batch,
        "epochs": [{"val_loss": loss} for loss in losses],
        "all_reduces_per_step": 3,
        "all_reduce_bytes_per_step": 44_700_000,
    }


def test_a_study_of_batches_is_stored(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(lesson: Path, *flags: object, **_: object) -> dict:
        overlay = next(word for word in map(str, flags) if "_b" in word)
        if "_b64" in overlay:
            return summary(64, [2.0, 0.5])
        return summary(512, [2.0, 1.0] if "long" not in overlay else [1.0, 0.5, 0.4])

    monkeypatch.setattr(large_batches, "train", train)
    large_batches.batches(seeds=2, limit_train=1000)
    rows = {row[0]: row[1:] for row in table(stored, "batches")["rows"]}
    assert rows["`cifar10_b64`"] == [0.004, 2, 32, 0.5, "0.500 to 0.500", "2 of 2", 32]
    assert rows["`cifar10_b512_sqrt_long`"][0] == pytest.approx(0.004 * math.sqrt(8), rel=0.01)
    assert rows["`cifar10_b512_sqrt_long`"][-2:] == ["2 of 2", 4]
    assert rows["`cifar10_b512_naive`"][-2:] == ["0 of 2", None]
    assert [row[1:] for row in table(stored, "batches_by_seed")["rows"]] == [[2, 2], [0, 2], [2, 2]]
    assert {file.stem for file in stored.glob("*/*.png")} == {"large_batches", "many_batches"}
    large_batches.higher_rate(limit_train=1000)
    assert [row[0] for row in table(stored, "higher_rate")["rows"]] == ["0.004", "0.0112", "0.032"]


def test_the_learning_rates_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import learning_rates

    (tmp_path / "drawings").mkdir()
    monkeypatch.setattr(learning_rates, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning_rates.py"])
    learning_rates.main()
    assert (tmp_path / "drawings/learning_rates.png").stat().st_size > 1000


# NCCL's backends, on hand-made traces.

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
Kernel = tuple[str, float, float, float]
"""name; when it was launched, when it ran and how long, in milliseconds"""
OVERLAPPING = [
    ("sgemm forward", 5, 8, 20),  # runs beside the first all-reduce, but was launched before backward
    ("sgemm backward", 11, 30, 10),
    ("sgemm backward", 12, 40, 10),
    (ALL_REDUCE, 13, 25, 20),  # 15 of it beside backward
    (ALL_REDUCE, 19, 50, 4),  # the last bucket
    ("sgd", 22, 50, 4),  # launched after backward
    (ALL_REDUCE, 30, 60, 9),  # the sum of the losses
]


def trace_of(kernels: list[Kernel]) -> list[dict]:
    """The events of a trace with one backward pass on the CPU, from 10 to 20 ms, and these kernels."""
    events = [{"cat": "user_annotation", "name": "backward", "ts": 10_000, "dur": 10_000}]
    for number, (name, launched, start, length) in enumerate(kernels):
        args = {"correlation": number}
        events.append({"cat": "cuda_runtime", "name": "launch", "ts": 1000 * launched, "dur": 5.0, "args": args})
        events.append({"cat": "kernel", "name": name, "ts": 1000 * start, "dur": 1000 * length, "args": args})
    return sorted(events, key=lambda event: event["ts"])


def test_the_overlap_of_all_reduces_and_backward() -> None:
    assert nccl_backends.overlap(trace_of(OVERLAPPING)) == pytest.approx([24, 20, 15])
    side_by_side = [("a", 11, 30, 10), ("b", 12, 32, 10), (ALL_REDUCE, 13, 30, 12), (ALL_REDUCE, 14, 31, 5)]
    assert nccl_backends.overlap(trace_of(side_by_side)) == pytest.approx([12, 12, 12])
    with pytest.raises(UserError, match="no all-reduces"):
        nccl_backends.overlap(trace_of(OVERLAPPING[:3]))


def test_two_backends_need_two_gpus(run_script: Script) -> None:
    assert "which takes 2 GPUs; this machine shows 0" in run_script(f"{FOLDER}/nccl_backends.py").error
