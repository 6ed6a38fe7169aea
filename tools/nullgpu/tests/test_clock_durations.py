"""Durations of operations: learned in the first updates, looked up afterwards, and scaled for other sizes and GPUs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from conftest import Run
from nullgpu import curves, gpus

TRAINING = """
import os, sys, torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

seen = []
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    def forward(self, x):
        seen.append(_get_current_dispatch_mode() is not None)
        y = self.layers(x)
        if y.requires_grad:
            y.register_hook(lambda grad: seen.append(_get_current_dispatch_mode() is not None))
        return y
gpus, batches = torch.cuda.device_count(), [int(word) for word in sys.argv[1:]]
model = Model().cuda()
several = torch.nn.DataParallel(model) if gpus > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in batches:
    seen.clear()
    optimizer.zero_grad()
    several(torch.zeros(batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
    print("observed", sum(seen), "of", len(seen))
"""


def trained(folder: Path, nullgpu: Run, gpu: str, batches: list[int], gpus: int = 1) -> tuple[str, dict, list[dict]]:
    """Return what a training prints, the figures of its report, and the spans of its time line."""
    (folder / "train.py").write_text(TRAINING)
    files = ("--trace", folder / "trace.json", "--json", folder / "figures.json")
    done = nullgpu("--clock", gpu, "--gpus", gpus, "--host", 60, *files, "python", folder / "train.py", *batches)
    assert done.status == 0, done.stderr
    (rank,) = json.loads((folder / "figures.json").read_text())["clock"]["ranks"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return done.stdout, rank, [event for event in events if event["ph"] == "X"]


@pytest.mark.slow
def test_python_sees_no_operation_when_the_host_is_timed(tmp_path: Path, nullgpu: Run) -> None:
    said, rank, spans = trained(tmp_path, nullgpu, "h200", [4096] * 8)
    observed = re.findall(r"observed (\d) of 2", said)
    assert observed[0] == "2", "forward and backward of the first update"
    assert set(observed[rank["observed"] :]) == {"0"}, "and neither of them later"
    assert rank["observed"] <= 3 and not rank["is_observed"]
    assert (rank["of_other_sizes"], rank["unknown"]) == (0, {})
    products = [span["dur"] for span in spans if span["name"] == "addmm"]
    assert len(products) == 16
    assert max(products) == pytest.approx(min(products), rel=0.3), "as long as when they were observed"
    assert "durations: 100% by curves fitted to kernels of an H200\n" in said


@pytest.mark.slow
def test_the_threads_of_data_parallel_are_timed(tmp_path: Path, nullgpu: Run) -> None:
    said, rank, spans = trained(tmp_path, nullgpu, "a100", [8192] * 8, gpus=2)
    assert "observed 4 of 4" in said and said.rstrip().find("observed 0 of 4") > 0
    streams = {span["tid"] for span in spans if span["name"] == "addmm"}
    assert len(streams) == 2, "one on each GPU"
    assert not any("gemm" in kernel or "Lt" in kernel for kernel in rank["unknown"])
    *_, last = (span for span in spans if span["name"] == "addmm")
    product = 1e6 * 2 * 4096 * 1024 * 4096 / gpus.read("a100")["clock"]["peak"]["fp32"]
    assert product < last["dur"] < 3 * product, "half of the batch"
    assert "% by curves fitted to kernels of an A100 that others timed" in said


@pytest.mark.slow
def test_other_sizes_are_scaled_and_counted(tmp_path: Path, nullgpu: Run) -> None:
    said, rank, spans = trained(tmp_path, nullgpu, "a100", [4096] * 6 + [8192] * 2)
    assert 0 < rank["of_other_sizes"] < rank["launches"]
    assert "of the launches are scaled from other sizes" in said
    products = [span["dur"] for span in spans if span["name"] == "addmm"]
    assert products[-1] == pytest.approx(2 * products[0], rel=0.3), "twice the batch"


@pytest.mark.slow
def test_products_of_different_sizes_keep_their_durations(tmp_path: Path, nullgpu: Run) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nweight = torch.nn.Parameter(torch.zeros(64, 64, device='cuda'))\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "x = [torch.zeros(n, n, device='cuda', dtype=torch.bfloat16) for n in (8192, 1024)]\n"
        "for _ in range(8):\n    optimizer.zero_grad()\n    for one in x:\n        one @ one\n"
        "    weight.sum().backward()\n    optimizer.step()\n"
    )
    done = nullgpu("--clock", "h200", "--trace", tmp_path / "trace.json", "python", tmp_path / "train.py")
    assert done.status == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    large, small = ([e["dur"] for e in events if e["name"] == "mm"][at::2] for at in (0, 1))
    assert len(large) == len(small) == 8
    for durations, measured in ((large, 1406), (small, 9.4)):  # microseconds on an H200
        assert max(durations) == pytest.approx(min(durations), rel=0.01)
        assert durations[0] == pytest.approx(measured, rel=0.25)


def test_a_gpu_with_twice_the_peaks_needs_half_the_time() -> None:
    h200 = gpus.curves_of(gpus.read("h200"))
    twice = dataclasses.replace(
        h200,
        peak={name: 2 * peak for name, peak in h200.peak.items()},
        bandwidth=2 * h200.bandwidth,
        clock_rate=2 * h200.clock_rate,
        shortest=h200.shortest / 2,
    )
    for work in (
        curves.Product("bf16", 1, 8192, 8192, 8192),
        curves.Attention("bf16", True, 128, 2048, 2048, 128, True),
        curves.Convolution("tf32", 2, 2, False, 64, 64, 1, 3136, 256, 9, 2e8, 2e8),
        curves.BatchNorm(False, True, False, 64, 1e8, 4),
        curves.Moved("softmax", 1e9, 1e8),
        curves.Moved("elements", 1e9, 1e8),
    ):
        assert curves.Curves(twice).seconds(work) == pytest.approx(curves.Curves(h200).seconds(work) / 2, rel=0.01)


@pytest.mark.thorough  # compiles
def test_compiled_code_takes_the_time_of_its_kernels(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(
        "import torch\nx, w = torch.zeros(16 << 20, device='cuda'), torch.zeros(1024, 1024, device='cuda')\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "def several(x):\n    return (2 * x + 1).sigmoid() * x\n"
        "def product(w):\n    return (w @ w).relu()\n"
        "for work, x in ((several, x), (product, w)):\n"
        "    for one in (work, torch.compile(work)):\n"
        "        one(x)\n        torch.cuda.synchronize()\n        a.record()\n        one(x)\n        b.record()\n"
        "        torch.cuda.synchronize()\n        print('ms', a.elapsed_time(b), flush=True)\n"
    )
    done = nullgpu("--clock", "a100", "--host", 1000, "python", script)
    assert done.status == 0, done.stderr
    plain, compiled, product, compiled_product = (float(ms) for ms in re.findall(r"ms ([\d.]+)", done.stdout))
    gpu = gpus.read("a100")
    once = 1e3 * (64 << 20) / gpu["bandwidth"]
    assert 2 * once < compiled < 4 * once, "one kernel reads x and writes the result"
    assert plain > 3 * compiled, "four kernels"
    at_peak = 1e3 * 2 * 1024**3 / gpu["clock"]["peak"]["fp32"]
    assert compiled_product > at_peak
    assert compiled_product == pytest.approx(product, rel=0.2), "the product stays one of cuBLAS"
