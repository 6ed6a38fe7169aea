"""A trace has the steps that it should have, with named ranges and the work of the loader workers."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, Dataset

from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.profiling import trace as trace_module
from workshop.profiling.timeline import read_rows
from workshop.profiling.trace import Trace

CPU = torch.device("cpu")
RANGES = ("data", "forward", "backward", "optimizer")


class Few(BatchLoader):
    """A loader as far as a trace knows it."""

    def __init__(self, steps: int) -> None:
        self.batch_sampler = DistributedBatchSampler(steps, 1)


def train(trace: Trace, steps: int, each_step: Callable[[int], None] = lambda step: None) -> None:
    """Train a tiny model for one epoch, with the ranges that the lessons have."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace.start_epoch(Few(steps))
    for step in range(1, steps + 1):
        with record_function("data"):  # as the log does
            images = torch.randn(8, 4)
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(images).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        each_step(step)
        trace.end_step()


def fail_in_step_7(step: int) -> None:
    if step == 7:
        raise ValueError("diverged")


def ranges_in(file: Path) -> Counter[str]:
    with gzip.open(file, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    return Counter(event["name"].partition("#")[0] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(("steps", "first", "last"), [(30, 13, 18), (10, 5, 10), (5, 3, 5), (3, 3, 3)])
def test_a_limited_number_of_steps_is_recorded(tmp_path: Path, steps: int, first: int, last: int) -> None:
    lines: list[str] = []
    trace = Trace(tmp_path / "run", CPU, log=lines.append)
    train(trace, steps)
    ranges = ranges_in(tmp_path / "run" / "rank0.pt.trace.json.gz")
    assert {name: ranges[name] for name in RANGES} == dict.fromkeys(RANGES, last - first + 1)
    assert lines[:2] == [
        f"traced steps {first} to {last}: {trace.file}, for https://ui.perfetto.dev",
        "CPU time by operator",
    ]
    assert "aten::" in lines[2]


def test_only_the_first_epoch_is_traced(tmp_path: Path) -> None:
    trace = Trace(tmp_path, CPU, log=lambda line: None)
    train(trace, 10)
    trace.file.unlink()
    train(trace, 10)
    assert not trace.file.exists()


def test_an_epoch_of_warm_up_alone_is_not_traced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(Trace(tmp_path, CPU), 2)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "no trace: the epoch has 2 step(s), and the first 2 are to warm up\n"


def test_what_was_recorded_before_an_error_is_written(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="diverged"), Trace(tmp_path, CPU, log=lines.append) as trace:
        train(trace, 10, fail_in_step_7)
    assert ranges_in(trace.file)["optimizer"] == 3
    assert lines[0].startswith("traced steps 5 to 7")
    with pytest.raises(ValueError, match="diverged"), Trace(tmp_path / "early", CPU) as trace:
        train(trace, 30, fail_in_step_7)
    assert not trace.file.exists(), "the error came before the recording"


def test_a_full_disk_costs_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def export(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    steps: list[int] = []
    train(Trace(tmp_path, CPU), 10, steps.append)
    assert steps[-1] == 10
    assert capsys.readouterr().err == "warning: the trace is lost: [Errno 28] No space left on device\n"


class NvtxRanges(AbstractContextManager):
    """Stands in for ``emit_nvtx``, which needs CUDA."""

    calls: list[str]

    def __enter__(self) -> None:
        self.calls.append("ranges on")

    def __exit__(self, *exception: object) -> None:
        self.calls.append("ranges off")


def test_under_nsys_its_recording_is_started_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NvtxRanges.calls = calls = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(trace_module, "profile", None)  # would take CUPTI from Nsight Systems
    monkeypatch.setattr(trace_module, "emit_nvtx", NvtxRanges)
    lines: list[str] = []
    train(Trace(tmp_path, torch.device("cuda:1"), log=lines.append), 10, lambda step: calls.append(f"step {step}"))
    before, window = ([f"step {step}" for step in steps] for steps in (range(1, 5), range(5, 11)))
    wait = "wait for cuda:1"
    assert calls == [*before, wait, "start", "ranges on", *window, wait, "ranges off", "stop"]
    assert lines == ["leaving steps 5 to 10 to Nsight Systems"]
    assert not list(tmp_path.iterdir())


class Samples(Dataset):
    """A map-style data set."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)

    def __len__(self) -> int:
        return 40


class Batches(Samples):
    """A data set that reads the samples of a batch itself."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.ones(4) for _ in indices]


@pytest.mark.parametrize(
    ("dataset", "start_method"),
    [(Samples(), "fork"), (Batches(), "fork"), pytest.param(Samples(), "spawn", marks=pytest.mark.thorough)],
    ids=["samples", "batches", "samples, spawned workers"],
)
def test_the_batches_of_each_worker_are_in_the_trace(dataset: Samples, start_method: str, tmp_path: Path) -> None:
    shown: list[str] = []
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=start_method)
    with Trace(tmp_path, CPU, log=lambda line: None, show=lambda name, figure: shown.append(name)) as trace:
        loader.batch_sampler.start_step = 0  # as the sampler of the lessons has it
        trace.start_epoch(loader)
        batches = []
        for batch in loader:
            batches.append(batch)
            with record_function("data"):
                pass
            trace.end_step()
    assert torch.equal(torch.cat(batches), torch.full((40, 4), float(isinstance(dataset, Batches)))), "all, unchanged"
    rows = read_rows(trace.file)
    assert [len(rows[f"worker {number}"][0]) for number in (0, 1)] == [5, 5]
    assert shown == ["trace"]
    assert vars(dataset) == {}, "the data set is as it was"
