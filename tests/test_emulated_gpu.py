"""The emulated GPU of lesson 01: order and waiting on a simulated clock, and that the lesson runs with it."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread

import emulated_study
import lab.emulated_gpu
import quick_python
from conftest import Script
from emulated_timeline import plot, read_timeline, steps_launched_together
from lab.emulated_gpu import PUBLISHED, EmulatedGPU, EmulatedTensor
from slow_work import Clock
from workshop.profiling.timeline import read_rows

SCRIPT = "01_single_gpu/experiments/emulated_gpu.py"
TINY = ("--gpu_milliseconds", 0.01, "--load_milliseconds", 0, "--num_workers", 0, "--limit_train", 64)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gpu(clock: Clock) -> Iterator[EmulatedGPU]:
    EmulatedTensor.gpu = EmulatedGPU(depth=3, clock=clock.perf_counter, sleep=clock.sleep)
    yield EmulatedTensor.gpu
    del EmulatedTensor.gpu


def value(number: float = 1.0) -> EmulatedTensor:
    return torch.tensor(number, requires_grad=True).as_subclass(EmulatedTensor)


def test_launching_returns_at_once_and_the_work_is_done_in_order(gpu: EmulatedGPU, clock: Clock) -> None:
    first, second = gpu.launch("forward", 2.0), gpu.launch("backward", 3.0)
    assert clock.now == 0
    assert (first.began, first.ended, second.began, second.ended) == (0, 2, 2, 5)
    gpu.wait_for(first)
    assert clock.now == 2
    gpu.synchronize()
    assert clock.now == 5
    assert [(wait.began, wait.ended) for wait in gpu.waits] == [(0, 2), (2, 5)]
    gpu.synchronize()
    assert (clock.now, len(gpu.waits)) == (5, 2), "nothing was left to wait for"


def test_a_gpu_that_has_nothing_to_do_begins_when_work_is_launched(gpu: EmulatedGPU, clock: Clock) -> None:
    gpu.launch("forward", 1.0)
    clock.sleep(10)
    late = gpu.launch("forward", 1.0)
    assert (late.launched, late.began) == (10, 10)


def test_a_full_queue_makes_the_next_launch_wait_for_the_oldest_piece(gpu: EmulatedGPU, clock: Clock) -> None:
    for _ in range(3):
        gpu.launch("forward", 2.0)
    assert clock.now == 0
    piece = gpu.launch("forward", 2.0)
    assert clock.now == 2, "the first of three is done, so there is space for one"
    assert (piece.launched, piece.began) == (0, 6)
    assert [wait.why for wait in gpu.waits] == ["the queue is full"]
    clock.sleep(10)
    gpu.launch("forward", 2.0)
    assert len(gpu.waits) == 1, "done work is not in the queue"


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda tensor: tensor.item(),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "numpy": lambda tensor: tensor.numpy(),
    "float": float,
    "int": int,
    "bool": bool,
    "print": repr,
    "format": lambda tensor: f"{tensor:.4f}",
    "if": lambda tensor: 1 if tensor > 0 else 0,
}
COMPUTES: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda tensor: 2 * tensor.detach() + 1,
    "comparison": lambda tensor: (tensor > 0).sum(),
    "loss": lambda tensor: F.cross_entropy(tensor.expand(2, 3), torch.zeros(2, dtype=torch.long)),
    "backward": lambda tensor: (3 * tensor).backward(),
    "shape": lambda tensor: (tensor.shape, len(tensor.expand(2)), tensor.dtype),
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_number_waits_for_all_queued_work(name: str, gpu: EmulatedGPU, clock: Clock) -> None:
    tensor = value().detach()
    gpu.launch("forward", 2.0)
    found = READS[name](tensor)
    assert clock.now == 2
    assert type(found) is not EmulatedTensor, "what was read is no longer on the GPU"


@pytest.mark.parametrize("name", COMPUTES)
def test_computing_does_not_wait(name: str, gpu: EmulatedGPU, clock: Clock) -> None:
    tensor = value()
    gpu.launch("forward", 2.0)
    found = COMPUTES[name](tensor)
    assert clock.now == 0
    if isinstance(found, torch.Tensor):
        found.tolist()
        assert clock.now == 2, "what is computed from a tensor of the GPU is on the GPU too"


def test_a_plain_tensor_that_takes_numbers_of_the_gpu_is_on_the_gpu(gpu: EmulatedGPU, clock: Clock) -> None:
    loss_sum, losses = torch.tensor(0.0), torch.zeros(4)
    loss_sum += value(2.0).detach()
    losses[1] = value(3.0).detach()
    for number, tensor in enumerate((loss_sum, losses[:2].isfinite()), start=1):
        gpu.launch("forward", 2.0)
        tensor.tolist()
        assert clock.now == 2 * number
    assert losses.tolist() == [0, 3, 0, 0]
    assert loss_sum.item() == 2


def test_the_lesson_prints_times_but_no_loss(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, *TINY, "--log_interval", 2, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (
        lines[1] == "emulated GPU: durations of the command line: 0.01 ms a sample on the GPU, 0 ms in a loader worker"
    )
    assert [line[:17] for line in lines[2:5]] == ["epoch 1  step 2/8", "epoch 1  step 4/8", "epoch 1  step 6/8"]
    assert all("samples/s" in line for line in lines[2:7])
    assert "loss" not in result.stdout
    assert "accuracy" not in result.stdout
    assert "emulated_gpu" in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize("read_every_step", ["true", "false"])
def test_the_lesson_runs_ahead_of_the_gpu_unless_it_reads_in_every_step(
    read_every_step: str, run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    made = []

    def make() -> EmulatedGPU:
        made.append(EmulatedGPU(clock=clock.perf_counter, sleep=clock.sleep))
        return made[-1]

    monkeypatch.setattr(lab.emulated_gpu, "EmulatedGPU", make)
    flags = ("--read_every_step", read_every_step, "--log_interval", 100, "--run_dir", tmp_path)
    result = run_script(SCRIPT, *TINY, *flags, "--gpu_milliseconds", 1000 * 3 / 8)
    assert result.status == 0, result.stderr
    pieces = list(made[0].pieces)[:8]
    assert [piece.name for piece in pieces] == ["forward", "backward"] * 4
    assert [piece.seconds for piece in pieces] == pytest.approx([1, 2] * 4)
    assert all(later.began == pytest.approx(earlier.ended) for earlier, later in pairwise(pieces)), "no gap"
    # In its first steps the run also reads the losses, to see whether they are finite; so not each step is ahead.
    ahead = [forward.launched < backward.ended for backward, forward in zip(pieces[1::2], pieces[2::2], strict=False)]
    assert any(ahead) == (read_every_step == "false")


def test_the_benchmark_knows_io_and_synthetic(run_script: Script, tmp_path: Path) -> None:
    flags = ("--benchmark", "true", "--benchmark_seconds", 0.01, "--run_dir", tmp_path)
    result = run_script(SCRIPT, *TINY, *flags)
    assert result.status == 0, result.stderr
    assert "emulated GPU" in result.stdout
    found = json.loads((tmp_path / "throughput.json").read_text())
    assert all(len(found[kind]["trials"]) == 3 for kind in emulated_study.KINDS)


def test_a_trace_has_the_work_of_the_emulated_gpu(run_script: Script, tmp_path: Path) -> None:
    flags = ("--trace", "true", "--limit_train", 160, "--run_dir", tmp_path)
    result = run_script(SCRIPT, *TINY, *flags, "--gpu_milliseconds", 1)
    assert result.status == 0, result.stderr
    rows = read_rows(tmp_path / "rank0.pt.trace.json.gz")
    (forward,), (backward,) = rows["forward"], rows["backward"]
    assert len(forward) == len(backward) == 6, "those of the traced steps"
    assert sum(length for _, length in backward) == pytest.approx(2 * sum(length for _, length in forward))


def test_the_numbers_of_steps_that_are_launched_together_stand_side_by_side() -> None:
    launches = [2.0, 4.0, 5.5, 67.0, 80.0]
    assert steps_launched_together(launches, apart=3) == [(2.0, "1, 2, 3"), (67.0, "4"), (80.0, "5")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu_milliseconds", 0), "--gpu_milliseconds must be above 0"),
        (("--load_milliseconds", -1), "--load_milliseconds must be 0 or more"),
        (("--loader", "memory"), "only --loader map is emulated"),
    ],
)
def test_what_cannot_be_emulated_is_refused(flags: tuple, message: str, run_script: Script) -> None:
    result = run_script(SCRIPT, *flags)
    assert result.status == 2
    assert message in result.stderr


def test_the_published_durations_are_those_of_the_sources() -> None:
    baseline, optimized, v100 = (PUBLISHED[name] for name in ("a100", "a100_optimized", "v100"))
    assert 1 / baseline.gpu == pytest.approx(376.537)
    assert 2 / baseline.load == pytest.approx(89.177), "two workers give the published IO"
    assert (1 / optimized.gpu, 1 / optimized.load) == (pytest.approx(707.966), pytest.approx(792.513))
    assert 64 * v100.gpu == pytest.approx(0.00299, rel=1e-3)


def test_times_add_up_without_overlap() -> None:
    found = emulated_study.predictions(300, 600)
    assert found == {"overlap": 300, "no overlap": pytest.approx(200)}


def test_the_time_of_a_line_is_a_list_of_rounds() -> None:
    rounds = [{"for": 1.0, "loss.backward()": 3.0}, {"for": 3.0, "loss.backward()": 1.0}]
    assert emulated_study.lines_in_turn(rounds) == [
        {"text": "for", "milliseconds": [1.0, 3.0], "share": 0.5},
        {"text": "loss.backward()", "milliseconds": [3.0, 1.0], "share": 0.5},
    ]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_study_measures_every_part(
    monkeypatch: pytest.MonkeyPatch, user_environment: dict[str, str], tmp_path: Path
) -> None:
    for name, content in user_environment.items():
        monkeypatch.setenv(name, content)
    monkeypatch.setattr(sys, "executable", str(quick_python.commands() / "python"))
    for name, content in {"WORKERS": (0,), "V100_WORKERS": (0,), "LOG_INTERVALS": (1,), "ENOUGH": 1, "FEW": 0}.items():
        monkeypatch.setattr(emulated_study, name, content)
    published = emulated_study.PUBLISHED_THROUGHPUTS
    monkeypatch.setattr(emulated_study, "PUBLISHED_THROUGHPUTS", {"DALI": published["DALI"]})
    flags = ["--quick", "true", "--gpu_milliseconds", "0.1", "--load_milliseconds", "0.1"]
    monkeypatch.setattr(sys, "argv", ["experiments/emulated_study.py", "--out", str(tmp_path), *flags])
    emulated_study.main()
    found = json.loads((tmp_path / "emulated_study.json").read_text())
    assert {"lines", "workers", "overlap", "v100", "timeline_step_milliseconds"} <= found.keys()
    assert all(any("loss.backward()" in row["text"] for row in rows) for rows in found["lines"].values())
    assert found["overlap"][0]["published"]["FULL"] == 396.084
    for name in ("emulated_workers.png", "emulated_overlap.png"):
        assert imread(tmp_path / name).shape[1] == 1100
