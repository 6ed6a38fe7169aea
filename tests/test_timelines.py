"""The time line of a trace: a row for everything that ran; with a GPU, the time of the work, not that of its launch."""

import gzip
import json
from pathlib import Path

from workshop.profiling.timeline import plot_traces, read_rows


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
            ("user_annotation", "gloo:all_reduce", start + 95, 1),  # not of gradients: whether to stop
            ("cpu_op", "aten::mm", start + 21, 1),
            ("loader_worker", "worker 0", start + 5, 50),
        )
    ]
    rows = read_rows(chrome_trace(tmp_path / "t.gz", *steps))
    assert list(rows) == ["data", "forward", "backward", "optimizer", "worker 0", "all-reduces"]
    assert rows["data"] == [[(5e6, 20), (5e6 + 100, 20)]]
    assert rows["all-reduces"] == [[(5e6 + 35, 5), (5e6 + 135, 5)], [(5e6 + 60, 10), (5e6 + 160, 10)]]
    above, below = plot_traces({"two steps": tmp_path / "t.gz", "the same": tmp_path / "t.gz"}).axes
    assert [label.get_text() for label in above.get_yticklabels()] == [*list(rows)[:-1], "2 all-reduces"]
    assert above.get_xlim() == below.get_xlim() == (0, 190)
    assert (above.get_title("left"), below.get_title("left")) == ("two steps", "the same")


def test_without_ranges_of_a_step_there_are_the_rows_of_the_gpu(tmp_path: Path) -> None:
    """As in a step that is the replay of a CUDA graph."""
    events = [
        ("user_annotation", "data", 0, 1),
        ("gpu_memcpy", "Memcpy HtoD", 1, 2),
        ("kernel", "sgemm", 3, 5),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 4),
    ]
    rows = read_rows(chrome_trace(tmp_path / "t.gz", *events))
    assert list(rows) == ["data", "all-reduces", "kernels on the GPU", "copies on the GPU"]


def launched(name: str, launch: float, start: float, length: float, number: int) -> list[dict]:
    """The CPU's launch and the GPU's kernel, in milliseconds; autograd's thread launches the kernels of backward."""
    about = {"ph": "X", "args": {"correlation": number}, "pid": 0}
    return [
        about | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1000 * launch, "dur": 5, "tid": "autograd"},
        about | {"cat": "kernel", "name": name, "ts": 1000 * start, "dur": 1000 * length, "tid": "stream"},
    ]


def gpu_trace(file: Path) -> Path:
    """Two steps that take 100 ms on the GPU and whose launches take 10 ms, with ranges of both clocks.

    As in real traces, the GPU's range of backward has only the first kernel, because another thread launches the rest.
    """
    events = []
    for step in range(2):
        cpu, gpu, number = 10 * step, 20 + 100 * step, 10 * step
        on_cpu = [(f"ProfilerStep#{step}", 0, 10), ("data", 0, 1), ("forward", 1, 3), ("backward", 5, 4)]
        on_gpu = [(f"ProfilerStep#{step}", 0, 32), ("forward", 0, 30), ("backward", 30, 1)]
        events += [
            {"ph": "X", "cat": category, "name": name, "ts": 1000 * (zero + at), "dur": 1000 * length}
            for category, zero, ranges in (("user_annotation", cpu, on_cpu), ("gpu_user_annotation", gpu, on_gpu))
            for name, at, length in ranges
        ]
        events += launched("conv", cpu + 2, gpu, 30, number)
        events += launched("ones", cpu + 5, gpu + 30, 1, number + 1)
        events += launched("conv_backward", cpu + 6, gpu + 31, 40, number + 2)
        events += launched("ncclDevKernel_AllReduce_Sum_f32", cpu + 7, gpu + 50, 10, number + 3)
        events += launched("ncclDevKernel_AllReduce_Sum_f32", cpu + 8, gpu + 71, 9, number + 4)
        events += launched("ncclDevKernel_AllReduce_Sum_f64", cpu + 9.5, gpu + 85, 1, number + 5)  # after backward
    with gzip.open(file, "wt") as lines:
        json.dump({"traceEvents": events[::-1]}, lines)
    return file


def test_on_a_gpu_a_range_lasts_as_long_as_the_work_launched_in_it(tmp_path: Path) -> None:
    file = gpu_trace(tmp_path / "t.gz")
    rows = read_rows(file)
    in_step = ["data", "forward", "forward launches", "backward", "backward launches"]
    assert list(rows) == [*in_step, "all-reduces", "kernels on the GPU"]
    assert rows["forward"] == [[(20, 30), (120, 30)]]
    assert rows["backward"] == [[(50, 50), (150, 50)]]
    assert rows["backward launches"] == [[(5, 4), (15, 4)]]
    assert rows["data"] == [[(0, 1), (10, 1)]]
    assert rows["all-reduces"] == [[(70, 10), (170, 10)], [(91, 9), (191, 9)]]  # two buckets; not the float64 value
    assert plot_traces({"": file}).axes[0].get_ylim() == (len(rows) - 0.5, -0.5)
