"""`measure.py gpu`: rows in time, each kept at once; its rows are made up here, and GPUs pretended."""

import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CalledProcessError

import gpu_day
import lesson_runs
import measure
import pytest
import record_file
import torch
from gpu_day import Place, Row
from trace_table import trace_table

import workshop.profiling
from conftest import REPOSITORY, Result, Script
from workshop.errors import UserError

SCRIPT = "results/measure.py"


def row(name: str, work: Callable[[], object] = lambda: None, seconds: int = 1, **figures: object) -> Row:
    """A row that does ``work`` after its first part of two."""

    def measured(_: Place) -> Iterator[dict]:
        yield {"part": 1}
        work()
        yield {"part": 2} | figures

    measured.__name__ = name
    return Row(measured, seconds)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "pretended_1gpu.json")


def run_rows(rows: list[Row], place: Place, seconds: float = 60) -> dict[str, str]:
    return gpu_day.measure_rows(rows, place, time.monotonic() + seconds + gpu_day.SPARE_SECONDS, "measure.py gpu")


def test_every_row_is_written_with_what_it_needs(place: Place) -> None:
    assert run_rows([row("one", figure=7), row("two")], place) == {}
    records = record_file.read_records(place.file)
    assert (records["one"]["part"], records["one"]["figure"]) == (2, 7)
    for record in records.values():
        assert record.keys() >= record_file.ABOUT
        assert "unfinished" not in record and record["row_seconds"] >= 0
    assert [file.name for file in place.file.parent.iterdir()] == [place.file.name]


def test_what_does_not_fit_is_left_out_and_named(place: Place) -> None:
    rows = [row("long", seconds=1000), row("short"), row("endless", lambda: time.sleep(100), seconds=0)]
    started = time.monotonic()
    left_out = run_rows(rows, place, seconds=3)
    assert time.monotonic() - started < 60
    assert left_out["long"].startswith("takes about 1000 s")
    assert left_out["endless"].endswith("a part of it is kept")
    records = record_file.read_records(place.file)
    assert records.keys() == {"short", "endless"}
    assert records["endless"]["unfinished"] and records["endless"]["part"] == 1


def test_a_measured_row_tells_how_long_it_takes(place: Place) -> None:
    run_rows([row("one")], place)
    record_file.put_record(place.file, "one", {"row_seconds": 500}, "measure.py gpu")
    assert run_rows([row("one")], place) == {"one": "takes about 500 s, and 60 s are left"}


def test_a_row_that_fails_does_not_stop_the_others(place: Place) -> None:
    def fail() -> None:
        raise UserError("no such data")

    assert run_rows([row("one", fail), row("two")], place) == {"one": "failed: no such data"}
    records = record_file.read_records(place.file)
    assert records["one"]["unfinished"] and records["two"]["part"] == 2


@pytest.mark.parametrize("killed", ["one", "two", "three"])
def test_killed_at_any_row_the_file_is_whole_and_the_next_start_goes_on(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    names = ["one", "two", "three"]
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS", "WORKSHOP_DATA"):
        monkeypatch.setenv(name, "")  # put back in the end
    monkeypatch.setattr(gpu_day, "bring_data", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)

    def rehearse(*rows: Row) -> None:
        monkeypatch.setattr(gpu_day, "ROWS", rows)
        gpu_day.main(["--rehearse", "true"])

    if (child := os.fork()) == 0:
        rehearse(*(row(n, lambda n=n: n == killed and os.kill(os.getpid(), signal.SIGKILL)) for n in names))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    file = tmp_path / "gpu_rehearsal" / "rehearsal.json"
    done = names[: names.index(killed)]
    records = record_file.read_records(file)
    assert [n for n, record in records.items() if "unfinished" not in record] == done
    assert records[killed]["part"] == 1
    order = []
    rehearse(*(row(n, lambda n=n: order.append(n)) for n in names))
    signal.signal(signal.SIGTERM, before)
    assert order == [n for n in names if n not in done] + done
    assert all("unfinished" not in record for record in record_file.read_records(file).values())
    assert "3 of 3 rows measured" in capsys.readouterr().out


def test_a_record_that_is_cut_short_leaves_those_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    record_file.put_record(place.file, "one", {"figure": 7}, "a command")
    write = Path.write_text

    def write_half(file: Path, text: str) -> None:
        write(file, text[: len(text) // 2])
        raise OSError

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError):
        record_file.put_record(place.file, "two", {"figure": 8}, "a command")
    assert record_file.read_records(place.file).keys() == {"one"}


def test_without_line_profiler_the_rest_is_measured(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "find_spec", lambda name: None if name == "line_profiler" else name)
    baseline = next(row for row in gpu_day.ROWS if row.name == "baseline")
    assert run_rows([baseline, row("other")], place) == {"baseline": "line_profiler is not installed"}


def test_lessons_train_without_line_profiler(run_script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "line_profiler", None)
    monkeypatch.delitem(sys.modules, workshop.profiling.__name__)
    result = run_script("01_single_gpu/train.py", "--limit_train", 64, "--limit_val", 64, "--loader", "memory")
    assert result.status == 0, result.stderr


def mistake(result: Result) -> str:
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_mistake_is_one_line_and_status_2(run_script: Script, tmp_path: Path) -> None:
    assert "has no NVIDIA GPU: try all rows on the CPU with --rehearse true" in mistake(run_script(SCRIPT, "gpu"))
    for minutes in ("0", "-1", "nan"):
        assert f"--minutes must be above 0, got {float(minutes)}" in mistake(
            run_script(SCRIPT, "gpu", "--minutes", minutes)
        )
    assert "--rehearse: takes true or false, got 'yes'" in mistake(run_script(SCRIPT, "gpu", "--rehearse", "yes"))
    assert "no experiment 'gpus'" in mistake(run_script(SCRIPT, "gpus"))


@pytest.mark.parametrize("text", ["[]", "{", '{"fast": 3}', '{"fast": {"rows": []}}'])
def test_a_file_of_another_schema_is_refused(run_script: Script, tmp_path: Path, text: str) -> None:
    file = tmp_path / "gpu_rehearsal" / "rehearsal.json"
    file.parent.mkdir()
    file.write_text(text)
    before = signal.getsignal(signal.SIGTERM)
    assert str(file) in mistake(run_script(SCRIPT, "gpu", "--rehearse", "true", WORKSHOP_RUNS=str(tmp_path)))
    signal.signal(signal.SIGTERM, before)
    assert file.read_text() == text


def test_every_row_starts_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU, and in a rehearsal, each of the rows names scripts and files that exist."""
    started = []

    def note(command: list, folder: Path, **_: object) -> dict:
        started.append((folder, [str(word) for word in command]))
        epoch = {"seconds": 1.0, "samples_per_second": 1.0, "val_accuracy": 0.99}
        return {"epochs": [epoch], "first_step_seconds": 0.5, "config": {}}

    monkeypatch.setattr(lesson_runs, "read_record", note)
    monkeypatch.setattr(gpu_day.subprocess, "run", lambda command, cwd, check: note(command, cwd))
    monkeypatch.setattr(gpu_day, "trace_table", lambda _: {})
    monkeypatch.setattr(gpu_day, "line_profile", lambda *flags: note(["train.py", *flags], gpu_day.LESSON_01))
    for rehearsal in (True, False):
        for measured in gpu_day.ROWS:
            count = len(started)
            assert list(measured.measure(Place(tmp_path / "a.json", rehearsal)))
            assert len(started) > count
    for folder, words in started:
        files = [word for word in words if word.endswith((".py", ".yaml"))]
        assert files and all((folder / file).exists() for file in files)


def test_training_seconds_are_kept_with_those_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = {"seconds": 2.0, "samples_per_second": 1.0, "val_accuracy": 0.99}
    monkeypatch.setattr(lesson_runs, "train", lambda *_, **__: {"epochs": [epoch], "first_step_seconds": 0.5})
    (found,) = lesson_runs.time_to_target(1, names=("baseline",))
    assert found["runs"] == {"baseline": [epoch | {"first_step_seconds": 0.5}]}


@pytest.mark.parametrize(("gpus", "ranks", "hidden"), [(0, 2, False), (1, 2, True), (4, 4, False)])
def test_one_gpu_is_hidden_from_what_needs_two(
    gpus: int, ranks: int, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    seen = []

    def study(*_: object, ranks: int = 1) -> dict:
        seen.append((ranks, os.environ["CUDA_VISIBLE_DEVICES"]))
        return {}

    monkeypatch.setattr(measure, "study", study)
    measure.allreduce()
    measure.scaling()
    measure.survive()
    assert seen == [(ranks, "" if hidden else "0"), (1, "" if hidden else "0"), (2, "" if hidden else "0")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("error", [UserError("needs two"), CalledProcessError(1, ["torchrun"])], ids=type)
def test_what_cannot_be_measured_does_not_cost_the_rest(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail() -> dict:
        raise error

    file = REPOSITORY / "runs" / f"{os.getpid()}.json"  # told relative to the repository
    file.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(measure, "EXPERIMENTS", {"one": fail, "two": lambda: {"figure": 1}})
    try:
        with pytest.raises(UserError, match="not measured: one; the lines above say why"):
            measure.measure(["one", "two"], file)
        assert record_file.read_records(file)["two"]["figure"] == 1
        assert f"one: not measured: {error}" in capsys.readouterr().err
    finally:
        file.unlink()


def test_hardware_that_another_process_measured_with_is_told(place: Place) -> None:
    record_file.put_record(place.file, "one", {"hardware": {"device": "cuda"}}, "a command")
    (record,) = record_file.read_records(place.file).values()
    assert (record["hardware"], record["command"]) == ({"device": "cuda"}, "a command")


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": tid}


def test_the_table_of_a_trace_counts_each_microsecond_once(tmp_path: Path) -> None:
    steps = [event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 900) for n in range(2)]
    steps += [event("aten::conv", "cpu_op", 1000 * n, 500) for n in range(2)]
    steps += [event("aten::pad", "cpu_op", 1000 * n + 100, 100) for n in range(2)]
    steps += [event("aten::pad", "cpu_op", 0, 50, tid=2), {"ph": "M", "name": "a name"}]
    kernels = [event("gemm", "kernel", 10, 300, tid=7), event("copy", "gpu_memcpy", 320, 100, tid=7)]
    for name, events in (("cpu", steps), ("gpu", steps + kernels)):
        with gzip.open(tmp_path / name, "wt") as file:
            json.dump({"traceEvents": events}, file)
    on_cpu, on_gpu = trace_table(tmp_path / "cpu"), trace_table(tmp_path / "gpu")
    assert (on_cpu["clock"], on_cpu["steps"], on_cpu["step_ms"]) == ("CPU", 2, 0.9)
    assert [(r["name"], r["calls_per_step"], r["ms_per_step"]) for r in on_cpu["rows"]] == [
        ("aten::conv", 1, 0.4),
        ("aten::pad", 1.5, 0.125),
    ]
    assert (on_gpu["clock"], [r["name"] for r in on_gpu["rows"]]) == ("GPU", ["gemm", "copy"])
    assert on_gpu["rows"][0]["share"] == 0.75
