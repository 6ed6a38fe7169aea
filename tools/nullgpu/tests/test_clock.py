"""The clock: waits, copies, graphs and collectives take the time that they should; the report says what limits a loop.

No test depends on the speed of this machine: times of the GPU follow from its figures, and the host is only slower.
"""

import dataclasses
import json
import re
from pathlib import Path

import line_profiler
import pytest

from conftest import Run
from nullgpu import clocked, curves, gpus, timeline
from nullgpu.interface import Span, Work

SCRIPT = """
import json, sys, time
import torch

big = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
found = {}
def timed(function, count=1):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(count):
        function()
    end.record()
    issued = time.perf_counter() - began
    torch.cuda.synchronize()
    return [start.elapsed_time(end), 1e3 * issued, 1e3 * (time.perf_counter() - began)]

found["matmul"] = timed(lambda: big @ big, 20)
host = torch.zeros(64 << 20, dtype=torch.uint8)
pinned, target = host.pin_memory(), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
found["pinned"] = timed(lambda: target.copy_(pinned, non_blocking=True))
found["pageable"] = timed(lambda: target.copy_(host, non_blocking=True))
side = torch.cuda.Stream()
def two_streams():
    big @ big
    with torch.cuda.stream(side):
        big @ big
    torch.cuda.current_stream().wait_stream(side)
found["two streams"] = timed(two_streams, 1)
def one_ahead():  # as a loader makes the next batch
    big @ big
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big @ big
        done = side.record_event()
    for _ in range(2):
        big @ big
    torch.cuda.current_stream().wait_event(done)
found["one ahead"] = timed(one_ahead, 1)
def beside_a_copy():
    with torch.cuda.stream(side):
        target.copy_(pinned, non_blocking=True)
    big @ big
    torch.cuda.current_stream().wait_stream(side)
found["beside a copy"] = timed(beside_a_copy, 1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10):
        big @ big
found["graph"] = timed(graph.replay)
done = torch.cuda.Event()
big @ big
done.record()
found["early"] = done.query()
torch.cuda.synchronize()
found["late"] = done.query()
real, simulated, x = time.clock_gettime(time.CLOCK_MONOTONIC), time.perf_counter(), torch.zeros(16)
for _ in range(2000):
    x.add_(1)
found["on the CPU"] = [time.perf_counter() - simulated, time.clock_gettime(time.CLOCK_MONOTONIC) - real]
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        return float(torch.utils._python_dispatch._get_current_dispatch_mode() is not None)
for workers in (0, 1):
    found[f"seen with {workers} workers"] = sum(torch.utils.data.DataLoader(Samples(), num_workers=workers)).item()
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, nullgpu: Run) -> dict:
    """What the script has measured with CUDA's own events: GPU, issued, all; in ms."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "script.py").write_text(SCRIPT)
    done = nullgpu("--clock", "a100", "python", folder / "script.py", folder / "found.json")
    assert done.status == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


MATMUL = 2 * 8192**3 / 312e12 * 1e3
"""ms at the peak of an A100"""


def test_a_large_matrix_product_attains_a_share_of_the_peak_and_the_host_runs_ahead(found: dict) -> None:
    gpu, issued, whole = found["matmul"]
    assert 20 * MATMUL < gpu < 3 * 20 * MATMUL
    assert issued < 0.7 * gpu  # launches only
    assert whole >= 0.99 * gpu  # synchronize() waits


def test_the_host_waits_for_pageable_copies_only(found: dict) -> None:
    figures = gpus.read("a100")["clock"]
    for kind in ("pinned", "pageable"):
        assert found[kind][0] >= 0.99e3 * (64 << 20) / figures[kind]
    assert found["pinned"][1] < found["pinned"][0]
    assert found["pageable"][1] >= 0.99 * found["pageable"][0]


def test_kernels_of_two_streams_take_turns_and_copies_run_beside_them(found: dict) -> None:
    one, copy = found["matmul"][0] / 20, found["pinned"][0]
    assert found["two streams"][0] > 1.9 * one, "each of these products fills the GPU"
    assert found["one ahead"][0] > 3.8 * one, "also if those that come later are on the stream of the training"
    assert found["beside a copy"][0] < 0.9 * (one + copy) or found["beside a copy"][1] > copy  # the host was so slow


def test_a_graph_takes_the_time_of_what_it_has_recorded(found: dict) -> None:
    ten = found["graph"][0]
    assert 10 * MATMUL < ten < 1.2 * found["matmul"][0] / 2  # one by one they are later, if the host is busy


def test_operations_on_the_cpu_take_their_own_time(found: dict) -> None:
    simulated, real = found["on the CPU"]
    assert 0 < simulated <= real, "what the clock costs is left out, and no more than that"


def test_a_loader_is_not_slowed_by_the_clock(found: dict) -> None:
    assert (found["seen with 0 workers"], found["seen with 1 workers"]) == (0, 0)


def test_an_event_is_not_done_before_its_time(found: dict) -> None:
    assert (found["early"], found["late"]) == (False, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--clock", "a9000", "true"], "--clock knows a100, a100_40, h100, h200, l4, t4, or takes a TOML file"),
        (["--clock", "b200", "true"], "B200 has no figures for --clock: its file lacks, in [clock], peak, pinned"),
        (["--clock", "a100", "--values", "true"], "--clock does without --values"),
        (["--trace", "x.json", "true"], "--trace, --calibrate and --host need --clock"),
        (["--json", "x.json", "true"], "--json writes the figures of a report: it needs --report, --clock, or both"),
    ],
)
def test_misuse_is_one_line(nullgpu: Run, words: list[str], said: str) -> None:
    assert said in nullgpu(*words).error


def test_hidden_gpus_are_one_line(nullgpu: Run) -> None:
    assert "unset CUDA_VISIBLE_DEVICES" in nullgpu("python", "-V", CUDA_VISIBLE_DEVICES="").error


def span(start: float, end: float, kind: int = Work.KERNEL, stream: int = 1, cause: int = -1) -> Span:
    return Span(start, end, cause, stream, kind, "it")


def test_idle_times_have_their_causes() -> None:
    spans = [
        span(0, 1),
        span(3, 4),  # the loop waited for a batch from 1 to 2.5, and the host needed the rest
        span(3.5, 6, Work.NETWORK, stream=2),
        span(6, 7, cause=2),  # waits for the collective from 4 to 6
    ]
    busy, waits = timeline.idle(spans, [(1, 2.5)], 0, 8)
    assert busy == 3
    assert waits == {timeline.DATA: 1.5, timeline.HOST: 1.5, timeline.COMMUNICATION: 2}
    spans[2:] = [
        for_rank(3, 3.5, 5.5, stream=2),
        span(5.5, 6, Work.NETWORK, stream=2),
        span(6, 7, cause=3),
    ]
    _, waits = timeline.idle(spans, [(1, 2.5)], 0, 8)
    assert waits == {timeline.DATA: 1.5, timeline.HOST: 1.5, timeline.COMMUNICATION: 0.5, "rank 3": 1.5}


def test_a_copy_before_a_kernel_waits_for_the_collective() -> None:
    copy = span(4, 4.5, Work.TRANSFER, cause=1)
    _, waits = timeline.idle([span(0, 1), span(1, 4, Work.NETWORK, stream=2), copy, span(4.5, 5)], [], 0, 5)
    assert waits == {timeline.COPIES: 0.5, timeline.COMMUNICATION: 3, timeline.DATA: 0, timeline.HOST: 0}


def test_a_gpu_that_computes_for_another_stream_is_busy() -> None:
    spans = [span(0, 2), span(1, 3, stream=2), span(2, 4, Work.GIVES_WAY), span(4, 5)]
    busy, waits = timeline.idle(spans, [], 0, 5)
    assert busy == 5 and sum(waits.values()) == 0
    assert sum(timeline.longest(spans, 0, 5).values()) == 5, "no kernel counts twice"


def test_a_collective_for_which_nothing_waits_is_no_cause() -> None:
    first, second = span(1, 2, Work.NETWORK, stream=2), span(2, 4, Work.NETWORK, stream=2)
    _, waits = timeline.idle([span(0, 1), first, second, span(4, 5, cause=1)], [], 0, 5)
    assert waits == {timeline.COMMUNICATION: 1, timeline.HOST: 2, timeline.DATA: 0}, "the host launched it late"


def for_rank(rank: int, start: float, end: float, stream: int = 1) -> Span:
    return Span(start, end, -1, stream, Work.WAITS_FOR_RANK, f"waits for rank {rank}")


def test_a_collective_in_the_stream_that_computes_is_no_wait_for_the_host() -> None:
    collective, copy = span(2, 3, Work.NETWORK), span(3, 3.5, Work.TRANSFER)
    spans = [span(0, 1), for_rank(1, 1.25, 2), collective, copy, span(4, 5)]
    busy, waits = timeline.idle(spans, [], 0, 5)
    assert busy == 2
    expected = {"rank 1": 0.75, timeline.COMMUNICATION: 1, timeline.COPIES: 0.5, timeline.HOST: 0.75, timeline.DATA: 0}
    assert waits == expected


def test_updates_whose_kernels_were_not_noted_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [span(number, number + 1) for number in range(10)]
    found = {"updates": [1.0, 2.0, 3.0, 8.0, 20.0, 30.0], "loading": [], "observed": 0}
    monkeypatch.setattr(timeline, "MOST_SPANS", 10)
    it = timeline.summary(found, spans, skip=0)
    assert it and (it.updates, it.busy) == (3, 1)


def test_a_rank_is_called_slower_only_if_it_waits_less_itself() -> None:
    waits = {"rank 1": 0.4, timeline.HOST: 0.1}
    it = timeline.Summary(10, 0.1, 0.5, waits)
    others = {1: timeline.Summary(10, 0.1, 0.9, {timeline.HOST: 0.1})}
    assert "rank 1 is slower" in clocked.advice(it, others)
    others = {1: timeline.Summary(10, 0.1, 0.5, {"rank 0": 0.3, timeline.DATA: 0.2})}
    assert "in turn" in clocked.advice(it, others)


def test_every_gpu_has_all_figures() -> None:
    for file in gpus.FOLDER.glob("*.toml"):
        gpu = gpus.read(file.stem)
        assert all(gpu[key] > 0 for key in gpus.HARDWARE)
        if "clock" in gpu:
            assert all(value > 0 for value in gpus.clock_of(gpu, 1)["peak"].values())
    assert {gpus.of_sm(sm)["sm"] for sm in gpus.OF_SM} == set(gpus.OF_SM)
    assert gpus.of_sm(87)["sm"] == 86, "the newest one that is older"


def test_a_gpu_of_ones_own_says_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "a100"\ngb = 40\n[clock.between]\nbandwidth = 25e9\n')
    mine, a100 = gpus.read(str(file)), gpus.read("a100")
    assert (mine["gb"], mine["clock"]["between"]) == (40, a100["clock"]["between"] | {"bandwidth": 25e9})
    assert mine["clock"]["peak"] == a100["clock"]["peak"]


@pytest.mark.slow
def test_the_report_of_a_training_its_figures_and_its_time_line(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(4096, 4096).cuda()\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "d = torch.utils.data.DataLoader(torch.zeros(64, 4096), 4)\n"
        "for x in d:\n    o.zero_grad()\n    m(x.cuda()).sum().backward()\n    o.step()\n"
    )
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    done = nullgpu("--clock", "h100", "--trace", trace, "--json", figures, "python", script)
    assert done.status == 0, done.stderr
    (rank,) = json.loads(figures.read_text())["clock"]["ranks"]
    said = f"clock of an H100 (simulated): 12 updates, {1e3 * rank['seconds']:.2f} ms each, GPU busy {rank['busy']:.0%}"
    assert said in done.stdout
    assert rank["busy"] + sum(rank["waits"].values()) == pytest.approx(1)
    assert rank["waits"]["data"] > 0 and "addmm" in rank["operations"]
    assert "Losses are not computed" in done.stdout
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"addmm", "wait for a batch"} <= names


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


@pytest.mark.slow
def test_a_line_profile_shows_simulated_time(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "work.py"
    script.write_text(
        "import time, torch\nx = torch.zeros(8192, 8192, device='cuda')\n@profile\ndef work():\n"
        "    time.sleep(1.0)\n    y = x @ x\n    y.sum().item()\nwork()\n"
    )
    found = tmp_path / "work.lprof"
    done = nullgpu("--clock", "t4", "--host", 3, "kernprof", "-l", "-o", found, script)
    assert done.status == 0, done.stderr
    stats = line_profiler.load_stats(str(found))
    (lines,) = stats.timings.values()
    sleeping, _, reading = (stats.unit * time for _, _, time in lines)
    assert 1.0 / 3 <= sleeping < 1.0, "a host that is three times as fast needs a third of the time"
    matmul = 2 * 8192**3 / gpus.read("t4")["clock"]["peak"]["fp32"]
    assert reading > matmul, "the product shows where its result is read"


@pytest.mark.slow
def test_collectives_of_an_imaginary_world_take_time(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "x = torch.zeros(50_000_000, device='cuda')\ndist.all_reduce(x)\ntorch.cuda.synchronize()\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "a.record()\ndist.all_reduce(x)\nb.record()\ntorch.cuda.synchronize()\nprint('ms', a.elapsed_time(b))\n"
    )
    times = []
    for world in (8, 64):
        # the host's time must not count
        done = nullgpu("--clock", "h100", "--host", 1000, "--gpus", 8, "--world", world, "python", script)
        assert done.status == 0, done.stderr
        times.append(float(re.search(r"ms ([\d.]+)", done.stdout)[1]))  # type: ignore[index]
    inside = gpus.read("h100")["clock"]["inside"]["bandwidth"]
    assert times[0] == pytest.approx(1e3 * 2 * 7 / 8 * 2e8 / inside, rel=0.1)
    assert times[1] > times[0]


@pytest.mark.slow
def test_collectives_of_two_streams_share_the_network(tmp_path: Path, nullgpu: Run) -> None:
    """As the all-gathers and reduce-scatters of FSDP2: no step is shorter than its bytes divided by the bandwidth."""
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "other = dist.new_group(use_local_synchronization=False)\n"
        "x, y = (torch.zeros(50_000_000, device='cuda') for _ in range(2))\n"
        "dist.all_reduce(x), dist.all_reduce(y, group=other)\ntorch.cuda.synchronize()\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "for groups in ([None], [None, other]):\n    a.record()\n"
        "    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip((x, y), groups)]\n"
        "    [work.wait() for work in works]\n    b.record()\n    torch.cuda.synchronize()\n"
        "    print('ms', a.elapsed_time(b))\n"
    )
    done = nullgpu("--clock", "h100", "--host", 1000, "--gpus", 8, "--world", 64, "python", script)
    assert done.status == 0, done.stderr
    one, two = (float(ms) for ms in re.findall(r"ms ([\d.]+)", done.stdout))
    assert two == pytest.approx(2 * one, rel=0.1)


@pytest.mark.slow
def test_the_report_of_sharded_weights_names_the_network(tmp_path: Path, nullgpu: Run) -> None:
    """FSDP2 lets the stream of the training wait for one that waits for NCCL's."""
    slow = tmp_path / "slow.toml"
    slow.write_text('like = "a100"\n[clock.between]\nbandwidth = 1e9\n')
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        "torch.cuda.set_device(0)\ndist.init_process_group('nccl', device_id=torch.device('cuda', 0))\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()\n"
        "for layer in model:\n    fully_shard(layer)\nfully_shard(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.ones(64, 2048, device='cuda')\n"
        "for _ in range(8):\n    model(x).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    figures = tmp_path / "figures.json"
    done = nullgpu(
        *("--gpus", 4, "--world", 16, "--clock", slow, "--host", 20, "--json", figures, "python"), tmp_path / "train.py"
    )
    assert done.status == 0, done.stderr[-2000:]
    waits = json.loads(figures.read_text())["clock"]["ranks"][0]["waits"]
    assert waits["communication"] > 0.8


@pytest.mark.slow
def test_a_rank_waits_for_a_slower_one_and_the_report_says_for_which(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\ntorch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))\n"
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())\n"
        "o = torch.optim.SGD(m.parameters(), 0.1)\nx = torch.zeros(256 if rank == 0 else 2048, 4096, device='cuda')\n"
        "for _ in range(8):\n    o.zero_grad()\n    m(x).sum().backward()\n    o.step()\n"
    )
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    options = ("--clock", "a100", "--host", 60, "--gpus", 2)  # the host's time must not count
    launcher = ("torchrun", "--standalone", "--nproc_per_node", 2)
    done = nullgpu(*options, "--trace", trace, "--json", figures, *launcher, script)
    assert done.status == 0, done.stderr
    first, second = json.loads(figures.read_text())["clock"]["ranks"]
    assert first["waits"]["rank 1"] > 0.5
    assert second["busy"] > 0.5
    assert second["waits"].get("rank 0", 0) <= 0.005, "the slower rank waits for nobody"
    assert f"it waits for rank 1 {first['waits']['rank 1']:.0%}" in done.stdout
    assert f"rank 1: GPU busy {second['busy']:.0%}" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "AllReduce"} == {0, 1}


@pytest.mark.thorough
def test_sends_and_receives_wait_for_the_sender_and_move_both_ways_at_once(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "ring.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\ntorch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))\n"
        "x, y, big = (torch.zeros(n, device='cuda') for n in (50_000_000, 50_000_000, 2048 * 2048))\n"
        "a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))\ndist.all_reduce(x[:8])\n"
        "torch.cuda.synchronize()\na.record()\n"
        "if rank:\n    big.view(2048, 2048) @ big.view(2048, 2048)\n"
        "def both():\n    pair = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]\n"
        "    for one in dist.batch_isend_irecv(pair):\n        one.wait()\n"
        "both()\nb.record()\nboth()\nc.record()\ntorch.cuda.synchronize()\n"
        "print('ms', a.elapsed_time(b), b.elapsed_time(c), flush=True)\n"
    )
    launcher = ("torchrun", "--standalone", "--nproc_per_node", 2)
    done = nullgpu("--clock", "a100", "--host", 1000, "--gpus", 2, *launcher, script)
    assert done.status == 0, done.stderr
    figures = gpus.read("a100")["clock"]
    transfer = 1e3 * 200_000_000 / figures["inside"]["bandwidth"]
    product = 1e3 * 2 * 2048**3 / figures["peak"]["fp32"]
    both = re.findall(r"ms ([\d.]+) ([\d.]+)", done.stdout)
    assert len(both) == 2
    for first, second in both:  # rank 0 has nothing to compute, but receives only when rank 1 has sent
        assert product + transfer < float(first) < 2 * product + 1.5 * transfer
        assert transfer < float(second) < 1.5 * transfer


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


@pytest.mark.slow
def test_a_group_within_a_node_is_faster_than_one_over_nodes(nullgpu: Run, tmp_path: Path) -> None:
    """Of a mesh of two dimensions, with one process that stands for all ranks."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "torch.cuda.set_device(0)\ndist.init_process_group('nccl', device_id=torch.device('cuda', 0))\n"
        "mesh = init_device_mesh('cuda', (4, 4), mesh_dim_names=('over', 'within'))\n"
        "model, numbers = torch.nn.Linear(2, 2).cuda(), torch.zeros(1 << 24, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(8):\n"
        "    for name in ('over', 'within'):\n        dist.all_reduce(numbers, group=mesh.get_group(name))\n"
        "    dist.all_reduce(numbers)\n    model(torch.ones(1, 2, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = nullgpu(
        *("--gpus", 4, "--world", 16, "--clock", "a100", "--trace", tmp_path / "trace.json"),
        *("python", tmp_path / "train.py"),
    )
    assert done.status == 0, done.stderr[-2000:]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    over, within, all_ranks = [e["dur"] for e in events if e.get("name") == "AllReduce"][-3:]
    assert within < 0.6 * over and over < all_ranks, "within a node, over four, over all"
