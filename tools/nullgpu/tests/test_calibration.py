"""--calibrate takes durations from a trace of torch.profiler, and measure writes the file of a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from nullgpu import calibration, curves, gpus

HALF = "c10::BFloat16"


class Recorded:
    """A trace in the format of torch.profiler: operations with their kernels, one after the other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self.now = 0.0

    def add(self, name: str, tensors: dict[str, list[list[int]]], us: float, within: str = "") -> None:
        """Add an operation by types and sizes of its tensors; ``within`` is an operation around it."""
        number = len(self.events)
        types = [kind for kind, shapes in tensors.items() for _ in shapes]
        sizes = [shape for shapes in tensors.values() for shape in shapes]
        for at, (outer, margin) in enumerate([*([(within, 1.0)] if within else []), (name, 0.0)]):
            args = {"External id": number + at, "Input Dims": [*sizes, []], "Input type": [*types, "Scalar"]}
            event = {
                "cat": "cpu_op",
                "name": f"aten::{outer}",
                "tid": 7,
                "ts": self.now - margin,
                "dur": 5 + 2 * margin,
            }
            self.events.append({"ph": "X", **event, "args": args})
        kernel = {"cat": "kernel", "name": "k", "tid": 0, "ts": self.now + 3, "dur": us}
        self.events.append({"ph": "X", **kernel, "args": {"External id": len(self.events) - 1}})
        self.now += 100

    def write(self, file: Path) -> Path:
        """Write it."""
        file.write_text(json.dumps({"traceEvents": self.events}))
        return file


def key(name: str, *tensors: tuple[str, tuple[int, ...]]) -> calibration.Key:
    """Return what an operation is known by."""
    return calibration.Key(name, tensors)


def test_an_operation_has_the_time_of_the_kernels_within_it(tmp_path: Path) -> None:
    trace = Recorded()
    for us in (90.0, 40.0, 42.0):
        trace.add("cudnn_convolution", {HALF: [[8, 3, 9, 9], [4, 3, 3, 3]]}, us, within="convolution")
    found = calibration.read(trace.write(tmp_path / "trace.json"))
    tensors = ((HALF, (8, 3, 9, 9)), (HALF, (4, 3, 3, 3)))
    assert found[key("convolution", *tensors)] == pytest.approx(42e-6), "the median of three calls"
    assert found[key("cudnn_convolution", *tensors)] == pytest.approx(42e-6)


def test_only_the_same_operation_or_one_with_another_batch_is_found() -> None:
    known = key("addmm", ("float", (64,)), ("float", (512, 32)), ("float", (32, 64)))
    larger = key("addmm", ("float", (64,)), ("float", (2048, 32)), ("float", (32, 64)))
    wider = key("addmm", ("float", (64,)), ("float", (2048, 128)), ("float", (128, 64)))
    half = key("addmm", (HALF, (64,)), (HALF, (2048, 32)), (HALF, (32, 64)))
    assert calibration.of_another_batch(larger, known) == 4
    assert calibration.of_another_batch(wider, known) == calibration.of_another_batch(half, known) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no trace that torch.profiler has exported"),
        ('{"traceEvents": []}', "no kernels: profile with"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "dur": 1, "args": {"External id": 1}}]}',
            "no shapes: profile with",
        ),
    ],
)
def test_a_trace_without_what_is_needed_is_one_line(tmp_path: Path, nullgpu: Run, text: str, said: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    assert said in nullgpu("--clock", "h200", "--calibrate", file, "python", "-c", "").error


def test_a_trace_that_is_not_there_is_one_line(tmp_path: Path, nullgpu: Run) -> None:
    done = nullgpu("--clock", "h200", "--calibrate", tmp_path / "none.json", "python", "-c", "")
    assert "none.json: No such file" in done.error


TRAINING = """
import sys, torch
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch, file = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
def update():
    optimizer.zero_grad()
    model(torch.zeros(batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
if file:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        update()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(file)
else:
    for _ in range(12):
        update()
"""


@pytest.mark.slow
def test_a_training_takes_the_times_of_its_trace(tmp_path: Path, nullgpu: Run) -> None:
    script, trace, figures = (tmp_path / name for name in ("train.py", "trace.json", "figures.json"))
    script.write_text(TRAINING)
    assert nullgpu("python", script, 4096, trace).status == 0
    recorded = json.loads(trace.read_text())
    addmm = next(event["args"] for event in recorded["traceEvents"] if event["name"] == "aten::addmm")
    for event in recorded["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] = 9000.0 if event["args"]["External id"] == addmm["External id"] else 1.0
    trace.write_text(json.dumps(recorded))
    for batch, expected in ((4096, 9e-3), (8192, 18e-3)):
        options = ("--clock", "a100", "--calibrate", trace, "--json", figures)
        done = nullgpu(*options, "python", script, batch)
        assert done.status == 0, done.stderr
        (rank,) = json.loads(figures.read_text())["clock"]["ranks"]
        assert rank["operations"]["addmm"] / rank["updates"] == pytest.approx(expected, rel=0.02)
        assert rank["known_by"]["trace"] > 0.9 and "% from the trace" in done.stdout


@pytest.mark.slow
def test_measure_finds_the_gpu_that_it_measures(tmp_path: Path, nullgpu: Run) -> None:
    file = tmp_path / "mine.toml"
    done = nullgpu("--clock", "h200", "python", "-m", "nullgpu", "measure", "--out", file, "--seconds", 3)
    assert done.status == 0, done.stderr
    mine, h200 = gpus.read(str(file)), gpus.read("h200")
    assert (mine["sm"], mine["multiprocessors"]) == (90, 132)
    work = curves.Product("fp32", 1, 4096, 2048, 2048)
    own, known = (curves.Curves(gpus.curves_of(gpu)).seconds(work) for gpu in (mine, h200))
    assert own == pytest.approx(known, rel=0.3), "a shape that measure does not measure"


def test_measure_without_a_gpu_is_one_line(nullgpu: Run, tmp_path: Path) -> None:
    done = nullgpu("--gpus", 1, "env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "nullgpu", "measure")
    assert done.status == 2 and "error: measure needs a GPU" in done.stderr
