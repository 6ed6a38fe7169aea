"""A trace has the steps that it should have, with named ranges, also if the epoch is short or fails."""

import gzip
import json
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, Dataset

from conftest import REPOSITORY, Script
from lab.trace_table import trace_table
from workshop.config import TrainConfig
from workshop.loaders import DistributedBatchSampler, init_worker
from workshop.loaders.worker import WORKER_TIMES
from workshop.profiling import trace as trace_module
from workshop.profiling.timed_loader import TimedLoader
from workshop.profiling.timeline import plot_traces, read_rows
from workshop.profiling.trace import Trace, top_operators
from workshop.run import Run

CPU = torch.device("cpu")
RANGES = ("data", "forward", "backward", "optimizer")


def train(trace: Trace, steps: int, each_step: Callable[[int], None] = lambda step: None) -> None:
    """Train a tiny model for one epoch, with the ranges that the lessons have."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = TimedLoader([torch.randn(8, 4) for _ in range(steps)], window=1)
    for step, images in enumerate(trace.traced(batches, steps), start=1):
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(images).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        each_step(step)


def ranges_in(file: Path) -> Counter[str]:
    with gzip.open(file, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    return Counter(event["name"].partition("#")[0] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(
    ("steps", "first", "last", "planned"),
    [
        (30, 13, 18, ""),
        (18, 13, 18, ""),
        (10, 5, 10, ""),
        (5, 3, 5, " (6 were planned)"),
        (3, 3, 3, " (6 were planned)"),
    ],
)
def test_a_limited_number_of_steps_is_recorded(tmp_path: Path, steps: int, first: int, last: int, planned: str) -> None:
    lines: list[str] = []
    trace = Trace(tmp_path / "run", CPU, log=lines.append)
    train(trace, steps)
    ranges = ranges_in(tmp_path / "run" / "rank0.pt.trace.json.gz")
    recorded = last - first + 1
    assert {name: ranges[name] for name in RANGES} == dict.fromkeys(RANGES, recorded)
    assert ranges["ProfilerStep"] == recorded
    assert lines[0].startswith(f"traced steps {first} to {last}{planned}: {trace.file}")
    heading, *rows = lines[1].splitlines()
    assert heading.startswith("CPU time by operator")
    assert 5 < len(rows) <= 12
    assert any(row.startswith("aten::") for row in rows)
    assert "ProfilerStep" not in lines[1]
    assert max(map(len, rows)) < 80


def test_only_the_first_epoch_is_traced(tmp_path: Path) -> None:
    lines: list[str] = []
    trace = Trace(tmp_path, CPU, log=lines.append)
    train(trace, 10)
    trace.file.unlink()
    train(trace, 10)
    assert not trace.file.exists()
    assert len(lines) == 2


def test_an_epoch_of_warm_up_alone_is_not_traced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(Trace(tmp_path, CPU), 2)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "no trace: the epoch has 2 step(s), and the first 2 are to warm up\n"


class Numbers:
    """A loader of three steps."""

    dataset = range(3)
    batch_sampler = DistributedBatchSampler(3, 1, shuffle=True, seed=1)

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("flags", [{}, {"trace": True, "benchmark": True}], ids=["no trace", "benchmark"])
def test_a_run_without_a_trace_uses_no_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict) -> None:
    monkeypatch.setattr(trace_module, "Trace", None)  # would fail if it were used
    with Run(TrainConfig(run_dir=tmp_path, **flags), CPU) as run:
        assert list(run.batches(Numbers())) == [3, 1, 2]
    assert not list(tmp_path.glob("*.trace.*"))


def fail_in(failing_step: int) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step == failing_step:
            raise ValueError("diverged")

    return fail


def test_what_was_recorded_before_an_error_is_written(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="diverged"), Trace(tmp_path, CPU, log=lines.append) as trace:
        train(trace, 10, fail_in(7))
    assert ranges_in(trace.file)["optimizer"] == 3
    assert lines[0].startswith("traced steps 5 to 7 (6 were planned)")
    assert not torch.autograd._profiler_enabled()


def test_an_error_before_the_recording_leaves_no_trace(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="diverged"), Trace(tmp_path, CPU, log=lines.append) as trace:
        train(trace, 30, fail_in(12))
    assert not list(tmp_path.iterdir())
    assert lines == ["no trace: training ended in step 12, tracing was to start with step 13"]


def test_a_full_disk_costs_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def export(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    steps: list[int] = []
    train(Trace(tmp_path, CPU), 10, steps.append)
    assert steps[-1] == 10
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning == "warning: the trace is lost: [Errno 28] No space left on device"


@pytest.mark.parametrize("folder", ["/proc/nowhere", __file__])
def test_a_folder_that_cannot_be_written_costs_the_trace_alone(folder: str, capsys: pytest.CaptureFixture) -> None:
    steps: list[int] = []
    train(Trace(Path(folder), CPU), 10, steps.append)
    assert steps[-1] == 10
    assert capsys.readouterr().err.startswith("warning: the trace is lost: ")


def nvtx_ranges(calls: list[str]) -> Callable[[], AbstractContextManager]:
    """What stands in for ``emit_nvtx``, which needs CUDA."""

    class Ranges(AbstractContextManager):
        def __enter__(self) -> None:
            calls.append("ranges on")

        def __exit__(self, *exception: object) -> None:
            calls.append("ranges off")

    return Ranges


def test_the_ranges_for_nsys_are_those_of_pytorch() -> None:
    assert trace_module.emit_nvtx is torch.autograd.profiler.emit_nvtx


def test_under_nsys_its_recording_is_started_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(trace_module, "profile", None)  # would take CUPTI from Nsight Systems
    monkeypatch.setattr(trace_module, "emit_nvtx", nvtx_ranges(calls))
    lines: list[str] = []
    train(Trace(tmp_path, torch.device("cuda:1"), log=lines.append), 10, lambda step: calls.append(f"step {step}"))
    window = [f"step {step}" for step in range(5, 11)]
    before = [f"step {step}" for step in range(1, 5)]
    wait = "wait for cuda:1"
    assert calls == [*before, wait, "ranges on", "start", *window, wait, "stop", "ranges off"]
    assert lines == ["leaving steps 5 to 10 to Nsight Systems"]
    assert not list(tmp_path.iterdir())


def profiler_of(*events: tuple[str, DeviceType, float], raw: tuple = ()) -> SimpleNamespace:
    averages = [
        SimpleNamespace(key=key, device_type=device_type, self_device_time_total=microseconds, count=4)
        for key, device_type, microseconds in events
    ]
    return SimpleNamespace(key_averages=lambda: averages, events=lambda: raw)


def kernel(name: str, microseconds: float, annotation: bool = False) -> SimpleNamespace:
    """As the profiler has it, on the GPU."""
    length = SimpleNamespace(elapsed_us=lambda: microseconds)
    about = {"name": name, "device_type": DeviceType.CUDA, "is_user_annotation": annotation}
    return SimpleNamespace(**about, time_range=length, kernels=[])


def operator(*launched: tuple[str, float]) -> SimpleNamespace:
    kernels = [SimpleNamespace(name=name, duration=microseconds) for name, microseconds in launched]
    return SimpleNamespace(name="aten::mm", device_type=DeviceType.CPU, kernels=kernels)


def test_the_kernels_of_a_cuda_graph_are_in_the_table() -> None:
    raw = (
        operator(("sgemm", 500.0)),
        kernel("sgemm", 500.0),  # launched by the operator
        kernel("sgemm", 1500.0),  # by a graph, like the others
        kernel("void at::native::elementwise<4, float>(int)", 300.0),
        kernel("void at::native::elementwise<2, bool>(int)", 100.0),
        kernel("forward", 9000.0, annotation=True),
    )
    profiler = profiler_of(("aten::mm", DeviceType.CPU, 500.0), ("sgemm", DeviceType.CUDA, 2000.0), raw=raw)
    _, *rows = top_operators(profiler, torch.device("cuda"), steps=1).splitlines()
    assert [row.split() for row in rows] == [
        ["sgemm", "1.0", "1.50", "62.5%"],
        ["aten::mm", "4.0", "0.50", "20.8%"],
        ["at::native::elementwise", "2.0", "0.40", "16.7%"],
    ]


def chrome_trace(file: Path, *events: tuple[str, str, float, float]) -> Path:
    """A trace of (category, name, start and length in milliseconds)."""
    complete = [
        {"ph": "X", "cat": category, "name": name, "ts": 5e9 + 1000 * start, "dur": 1000 * length}
        for category, name, start, length in events
    ]
    with gzip.open(file, "wt") as lines:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name", "ts": 0.0}, *complete]}, lines)
    return file


def test_the_plot_has_a_row_for_everything_that_ran(tmp_path: Path) -> None:
    steps = [
        event
        for start in (0, 100)
        for event in (
            ("user_annotation", "data", start, 20),
            ("user_annotation", "forward", start + 20, 10),
            ("user_annotation", "backward", start + 30, 40),
            ("user_annotation", "gloo:all_reduce", start + 35, 5),
            ("user_annotation", "gloo:all_reduce", start + 60, 10),
            ("user_annotation", "optimizer", start + 70, 20),
            ("user_annotation", "gloo:all_reduce", start + 95, 1),  # whether to stop
            ("cpu_op", "aten::mm", start + 21, 1),
            ("loader_worker", "worker 0", start + 5, 50),
        )
    ]
    rows = read_rows(chrome_trace(tmp_path / "t.gz", *steps))
    assert list(rows) == ["data", "forward", "backward", "optimizer", "worker 0", "all-reduces"]
    assert rows["data"] == [[(5e6, 20), (5e6 + 100, 20)]]
    assert rows["all-reduces"] == [[(5e6 + 35, 5), (5e6 + 135, 5)], [(5e6 + 60, 10), (5e6 + 160, 10)]]
    (axes,) = plot_traces({"two steps": tmp_path / "t.gz"}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*list(rows)[:-1], "2 all-reduces"]
    assert axes.get_xlim() == (0, 190)


def test_on_a_gpu_kernels_copies_and_all_reduces_have_rows(tmp_path: Path) -> None:
    events = [
        ("user_annotation", "data", 0, 1),
        ("gpu_user_annotation", "forward", 2, 9),
        ("gpu_memcpy", "Memcpy HtoD", 1, 2),
        ("kernel", "sgemm", 3, 5),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 4),
    ]
    rows = read_rows(chrome_trace(tmp_path / "t.gz", *events))
    assert list(rows) == ["data", "all-reduces", "kernels on the GPU", "copies on the GPU"]


def launched(category: str, name: str, launch: float, start: float, length: float, number: int) -> list[dict]:
    """The CPU's launch and the GPU's work, in milliseconds."""
    about = {"ph": "X", "args": {"correlation": number}, "pid": 0, "tid": "nccl" if "AllReduce" in name else "compute"}
    return [
        about | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1000 * launch, "dur": 5, "tid": "autograd"},
        about | {"cat": category, "name": name, "ts": 1000 * start, "dur": 1000 * length},
    ]


GPU_ROWS = ["data", "forward", "forward launches", "backward", "backward launches", "all-reduces", "kernels on the GPU"]


def gpu_trace(file: Path, gpu_ranges_first: bool) -> Path:
    """Two steps that take 100 ms on the GPU and whose launches take 10 ms, with ranges of both clocks.

    As in real traces, the GPU's range of backward has only the first kernel, because autograd's thread launches the
    others.
    """
    events = []
    for step in range(2):
        cpu, gpu, number = 10 * step, 20 + 100 * step, 10 * step
        on_cpu = [(f"ProfilerStep#{step}", 0, 10), ("data", 0, 1), ("forward", 1, 3), ("backward", 5, 4)]
        on_gpu = [(f"ProfilerStep#{step}", 0, 32), ("forward", 0, 30), ("backward", 30, 1)]
        ranges = [
            {"ph": "X", "cat": category, "name": name, "ts": 1000 * (zero + at), "dur": 1000 * length}
            for category, zero, found in (("user_annotation", cpu, on_cpu), ("gpu_user_annotation", gpu, on_gpu))
            for name, at, length in found
        ]
        events += ranges[::-1] if gpu_ranges_first else ranges
        events += launched("kernel", "conv", cpu + 2, gpu, 30, number)
        events += launched("kernel", "ones", cpu + 5, gpu + 30, 1, number + 1)
        events += launched("kernel", "conv_backward", cpu + 6, gpu + 31, 40, number + 2)
        events += launched("kernel", "ncclDevKernel_AllReduce_Sum_f32", cpu + 7, gpu + 50, 10, number + 3)
        events += launched("kernel", "ncclDevKernel_AllReduce_Sum_f32", cpu + 8, gpu + 71, 9, number + 4)
        events += launched("kernel", "ncclDevKernel_AllReduce_Sum_f64", cpu + 9.5, gpu + 85, 1, number + 5)
    with gzip.open(file, "wt") as lines:
        json.dump({"traceEvents": events[::-1] if gpu_ranges_first else events}, lines)
    return file


@pytest.mark.parametrize("gpu_ranges_first", [False, True])
def test_on_a_gpu_a_range_lasts_as_long_as_the_work_launched_in_it(tmp_path: Path, gpu_ranges_first: bool) -> None:
    file = gpu_trace(tmp_path / "t.gz", gpu_ranges_first)
    rows = read_rows(file)
    assert list(rows) == GPU_ROWS
    assert rows["forward"] == [[(20, 30), (120, 30)]]
    assert rows["backward"] == [[(50, 50), (150, 50)]]
    assert rows["backward launches"] == [[(5, 4), (15, 4)]]
    assert rows["data"] == [[(0, 1), (10, 1)]]
    assert rows["all-reduces"] == [[(70, 10), (170, 10)], [(91, 9), (191, 9)]]  # not those of the float64 value
    for lesson, name, expected in (
        ("03_ddp", "bucket_timelines", {"buckets": 2, "backward_milliseconds": 50}),
        ("01_single_gpu", "loading_timelines", {"step_milliseconds": 100, "data_milliseconds": 1}),
    ):
        script = runpy.run_path(str(REPOSITORY / lesson / "experiments" / f"{name}.py"))
        assert script["figures_of"](file) == expected
    assert plot_traces({"": file}).axes[0].get_ylim() == (len(rows) - 0.5, -0.5)


@pytest.mark.parametrize("gpu_ranges_first", [False, True])
def test_on_a_gpu_a_step_lasts_until_the_next_one_starts_there(tmp_path: Path, gpu_ranges_first: bool) -> None:
    found = trace_table(gpu_trace(tmp_path / "t.gz", gpu_ranges_first))
    assert (found["clock"], found["steps"], found["step_ms"]) == ("GPU", 2, 100)
    assert found["busy_ms_per_step"] == 91


def test_only_all_reduces_of_gradients_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    steps = [
        event
        for start in range(0, 600, 100)
        for event in (
            ("user_annotation", "data", start, 1),
            ("user_annotation", "backward", start + 30, 40),
            ("user_annotation", "gloo:all_reduce", start + 35, 5),
            ("user_annotation", "gloo:all_reduce", start + 60, 15),
            ("user_annotation", "gloo:all_reduce", start + 95, 1),  # whether to stop: on a slow machine in every step
        )
    ]
    file = chrome_trace(tmp_path / "t.gz", *steps)
    monkeypatch.setattr("sys.argv", ["trace_counts.py", str(file)])
    runpy.run_path(str(REPOSITORY / "03_ddp/experiments/trace_counts.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["data", "6", "1.00"], ["backward", "6", "40.00"], ["all-reduces", "12", "10.00"]]


@pytest.mark.parametrize(
    "content", [b"", b"no trace", gzip.compress(b"[]", mtime=0), gzip.compress(b'{"traceEvents": []}', mtime=0)]
)
def test_a_file_that_is_no_trace_is_reported_in_one_line(content: bytes, run_script: Script, tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(content)
    result = run_script("03_ddp/experiments/trace_counts.py", tmp_path / "t.gz")
    assert result.status == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "train.py --trace true" in result.stderr


class Samples(Dataset):
    """A map-style data set with the keys (epoch, index) of the lessons' sampler."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        return torch.zeros(4), key[1]

    def __len__(self) -> int:
        return 40


class Batches(Samples):
    """A data set that reads the samples of a batch itself."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
        return [(torch.ones(4), index) for _, index in keys]


@pytest.mark.parametrize(("samples", "number"), [(Samples(), 0), (Batches(), 1)], ids=["samples", "batches"])
def test_workers_log_when_they_prepared_a_batch(samples: Samples, number: int, tmp_path: Path) -> None:
    shown: list[str] = []
    loader = DataLoader(
        samples,
        batch_sampler=DistributedBatchSampler(40, 4, shuffle=True, seed=1),
        num_workers=1,
        worker_init_fn=init_worker,
    )
    with Trace(tmp_path, CPU, log=lambda _: None, show=lambda name, figure: shown.append(name)) as trace:
        batches = list(trace.traced(TimedLoader(loader, window=1), len(loader)))
    assert [len(targets) for _, targets in batches] == [4] * 10
    assert all((inputs == number).all() for inputs, _ in batches), "the data set's own way to read a batch is used"
    (worker,) = read_rows(trace.file)["worker 0"]
    assert len(worker) == 10
    assert shown == ["trace"]
    assert WORKER_TIMES not in os.environ


def test_on_cuda_the_table_shows_the_time_of_the_kernels() -> None:
    profiler = profiler_of(
        ("aten::add", DeviceType.CPU, 1000.0), ("aten::mm", DeviceType.CPU, 3000.0), ("sgemm", DeviceType.CUDA, 3000.0)
    )
    _, first, second = top_operators(profiler, torch.device("cuda"), steps=2).splitlines()
    assert first.split() == ["aten::mm", "2.0", "1.50", "75.0%"]
    assert second.split() == ["aten::add", "2.0", "0.50", "25.0%"]


def test_a_trace_without_kernels_is_reported() -> None:
    profiler = profiler_of(("aten::mm", DeviceType.CPU, 0.0))
    assert "no GPU time" in top_operators(profiler, torch.device("cuda"), steps=2)
