"""The emulated GPU of lesson 01: order and waiting on a simulated clock; the lesson runs with it; its study."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread

import lab.emulated_gpu
from conftest import Script
from lab.emulated_gpu import PUBLISHED, EmulatedGPU, EmulatedTensor
from slow_work import Clock

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
    clock.sleep(10)
    late = gpu.launch("forward", 1.0)
    assert (late.launched, late.began) == (15, 15), "a GPU that has nothing to do begins at once"


def test_a_full_queue_makes_the_next_launch_wait_for_the_oldest_piece(gpu: EmulatedGPU, clock: Clock) -> None:
    for _ in range(3):
        gpu.launch("forward", 2.0)
    assert clock.now == 0
    piece = gpu.launch("forward", 2.0)
    assert clock.now == 2, "the first of three is done, so there is space for one"
    assert (piece.launched, piece.began) == (0, 6)
    assert [wait.why for wait in gpu.waits] == ["the queue is full"]


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


def test_a_sum_that_takes_numbers_of_the_gpu_is_on_the_gpu(gpu: EmulatedGPU, clock: Clock) -> None:
    loss_sum = torch.tensor(0.0)
    loss_sum += value(2.0).detach()
    gpu.launch("forward", 2.0)
    assert loss_sum.item() == 2
    assert clock.now == 2


def test_the_lesson_prints_times_but_no_loss(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, *TINY, "--log_interval", 2, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    lines = [line.partition("  ")[2] for line in result.stdout.splitlines()]  # without the time
    durations = "durations of the command line: 0.01 ms a sample on the GPU, 0 ms in a loader worker"
    assert lines[1] == f"emulated GPU: {durations}"
    assert [line[:17] for line in lines[2:5]] == ["epoch 1  step 2/8", "epoch 1  step 4/8", "epoch 1  step 6/8"]
    assert all("samples/s" in line for line in lines[2:7])
    assert "loss" not in result.stdout and "accuracy" not in result.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["emulated_gpu"] == durations


@pytest.mark.parametrize("log_interval", [1, 100])
def test_the_lesson_runs_ahead_of_the_gpu_unless_it_reads_in_every_step(
    log_interval: int, run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    made = []

    def make() -> EmulatedGPU:
        made.append(EmulatedGPU(clock=clock.perf_counter, sleep=clock.sleep))
        return made[-1]

    monkeypatch.setattr(lab.emulated_gpu, "EmulatedGPU", make)
    flags = ("--log_interval", log_interval, "--run_dir", tmp_path, "--gpu_milliseconds", 1000 * 3 / 8)
    result = run_script(SCRIPT, *TINY, *flags)
    assert result.status == 0, result.stderr
    pieces = list(made[0].pieces)[:16]
    assert [piece.name for piece in pieces] == ["forward", "backward"] * 8
    assert [piece.seconds for piece in pieces] == pytest.approx([1, 2] * 8)
    assert all(later.began == pytest.approx(earlier.ended) for earlier, later in pairwise(pieces)), "no gap"
    ahead = [forward.launched < backward.ended for backward, forward in zip(pieces[1::2], pieces[2::2], strict=False)]
    assert ahead == [log_interval == 100] * 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu_milliseconds", 0), "--gpu_milliseconds must be above 0"),
        (("--load_milliseconds", -1), "--load_milliseconds must be 0 or more"),
        (("--loader", "memory"), "only --loader map is emulated"),
    ],
)
def test_what_cannot_be_emulated_is_refused(flags: tuple, message: str, run_script: Script) -> None:
    assert message in run_script(SCRIPT, *flags).error


def test_the_published_durations_are_those_of_the_sources() -> None:
    baseline, optimized, v100 = (PUBLISHED[name] for name in ("a100", "a100_optimized", "v100"))
    assert 1 / baseline.gpu == pytest.approx(376.537)
    assert 2 / baseline.load == pytest.approx(89.177), "two workers give the published IO"
    assert (1 / optimized.gpu, 1 / optimized.load) == (pytest.approx(707.966), pytest.approx(792.513))
    assert 64 * v100.gpu == pytest.approx(0.00299, rel=1e-3)


def test_the_study_stores_lines_throughputs_and_time_lines(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With one real trace, and figures as a profile and a benchmark give them."""
    flags = ("--trace", "true", "--limit_train", 160, "--log_interval", 3, "--run_dir", tmp_path / "run")
    assert run_script(SCRIPT, *TINY[:6], *flags).status == 0
    texts = {"for inputs in batches:": 10, "optimizer.zero_grad()": 10, "value = loss.item()  # waits": 1, "nothing": 1}
    seconds = (0.8, 0.1, 0.1, 0.0001)

    def line_profile(*_: Any, **__: Any) -> tuple:  # noqa: ANN401
        return {}, [{"text": t, "hits": n, "seconds": s} for (t, n), s in zip(texts.items(), seconds, strict=True)]

    def train(*flags: Any, keep_in: Path | None = None, **_: Any) -> dict:  # noqa: ANN401
        if keep_in:
            shutil.copy(tmp_path / "run/rank0.pt.trace.json.gz", keep_in)
        return {kind: {"trials": [1.0, 2.0, 3.0]} for kind in ("IO", "SYNTHETIC", "FULL")}

    monkeypatch.setattr("lab.launching.line_profile", line_profile)
    monkeypatch.setattr("lab.launching.train", train)
    result = run_script("01_single_gpu/experiments/emulated_study.py", WORKSHOP_RESULTS=str(tmp_path / "results"))
    assert result.status == 0, result.stderr
    (folder,) = (tmp_path / "results").iterdir()
    tables = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert [row[:2] for row in tables["emulated_gpu_lines"]["rows"]] == [
        ["`for inputs in batches:`", [80, 0]],
        ["`optimizer.zero_grad()`", [10, 0]],
        ["`value = loss.item()`", [10, 0]],
        ["**all lines**", [pytest.approx(100.01), 0]],
    ]
    assert [row[0] for row in tables["emulated_gpu_workers"]["rows"]] == ["0", "1", "2", "4", "8", "12", "16"]
    assert tables["emulated_gpu_workers"]["rows"][2][3:] == [[2.0, pytest.approx(0.894, abs=0.001)], 86.5]
    for name in ("emulated_workers", "emulated_overlap"):
        assert len(tables[name]["rows"]) == 2 and all(row[1] > 0 for row in tables[name]["rows"])
        assert imread(folder / f"{name}.png").shape[1] == 1200
