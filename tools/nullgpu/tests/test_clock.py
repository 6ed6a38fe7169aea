"""The clock: waits, copies and graphs take the time that they should; the report says what limits a loop.

No test depends on the speed of this machine: times of the GPU follow from its figures, and the host is only slower.
"""

import json
from pathlib import Path

import line_profiler
import pytest

from conftest import Run
from nullgpu import gpus

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
        "import time, torch\nm = torch.nn.Linear(4096, 4096).cuda()\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "def read(rows):\n    time.sleep(0.005)\n    return torch.stack(rows)\n"  # longer than the GPU computes
        "d = torch.utils.data.DataLoader(torch.zeros(64, 4096), 4, collate_fn=read)\n"
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
