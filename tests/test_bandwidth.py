"""The bandwidth table: right units, every row there, nothing left behind, and mistakes told in one line."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bandwidth_trials
from bandwidth_trials import Bandwidth, MiB, check_folder, measure_device, measure_disk, measure_memory
from conftest import Script
from workshop.errors import UserError

SCRIPT = "01_single_gpu/experiments/bandwidth.py"
CPU = torch.device("cpu")


def test_units() -> None:
    row = Bandwidth(path="p", counted="copied", bytes=3 * 10**9, seconds=0.1)
    assert row.gb_per_second == pytest.approx(30)
    assert row.hours_per_petabyte == pytest.approx(1e15 / 30e9 / 3600)
    assert row.hours_per_petabyte == pytest.approx(9.26, abs=0.01)
    assert Bandwidth(path="p", note="not measured").gb_per_second is None
    assert Bandwidth(path="p", note="not measured").hours_per_petabyte is None


def test_disk_rows_count_the_bytes_of_the_file(tmp_path: Path) -> None:
    write, read, random = measure_disk(tmp_path, 2 * MiB, seconds=10)
    assert [row.path for row in (write, read, random)] == [
        "disk, sequential write",
        "disk, sequential read",
        "disk, random 4 KiB read",
    ]
    assert write.bytes == read.bytes == random.bytes == 2 * MiB
    assert "page cache" in read.note
    assert random.note.startswith("512 reads")


def test_a_slow_disk_is_stopped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_trials, "WRITE_BLOCK", MiB)
    monkeypatch.setattr(bandwidth_trials, "READ_BLOCK", MiB // 2)
    write, read, random = measure_disk(tmp_path, 100 * MiB, seconds=0)
    assert (write.bytes, read.bytes, random.bytes) == (MiB, MiB // 2, 4096)


@pytest.mark.parametrize("interrupted_after", [1, 2, 3])
def test_the_test_file_is_gone_whatever_happens(tmp_path: Path, interrupted_after: int) -> None:
    rows = measure_disk(tmp_path, MiB, seconds=10)
    for _ in range(interrupted_after):
        next(rows)
    rows.close()  # as an error or Ctrl-C would
    assert list(tmp_path.iterdir()) == []


def test_the_page_cache_is_said_to_stay_where_it_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    _, read, random = measure_disk(tmp_path, MiB, seconds=10)
    assert read.note == "page cache not dropped: may be memory's speed"
    assert random.note.endswith(read.note)


def test_the_page_cache_is_really_asked_to_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)  # in vain: the file stays in memory
    _, read, _ = measure_disk(tmp_path, MiB, seconds=10)
    assert not read.note.startswith("page cache dropped") or "if this kind" in read.note


def test_memory_rows_count_reading_and_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_trials, "available_cpus", lambda: 2)
    one, two = measure_memory(MiB, min_seconds=0)
    assert (one.path, two.path) == ("memory copy, 1 thread", "memory copy, 2 threads")
    assert {row.bytes for row in (one, two)} == {2 * MiB}
    assert one.counted == "read + written"
    monkeypatch.setattr(bandwidth_trials, "available_cpus", lambda: 1)
    assert len(list(measure_memory(MiB, min_seconds=0))) == 1


def test_without_an_accelerator_its_rows_say_so() -> None:
    rows = list(measure_device(CPU, MiB, min_seconds=0))
    assert [row.path for row in rows] == [
        "host to device, pageable",
        "host to device, pinned",
        "device to host, pageable",
        "device to host, pinned",
        "device to device",
    ]
    assert all(row.seconds is None and row.note == "not measured: no accelerator" for row in rows)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_accelerator_rows() -> None:
    rows = list(measure_device(torch.accelerator.current_accelerator(), MiB, min_seconds=0))
    measured = {row.path: row for row in rows if row.seconds}
    assert measured["host to device, pageable"].bytes == MiB
    assert measured["device to device"].bytes == 2 * MiB
    assert all("no pinned memory" in row.note for row in rows if not row.seconds)


class Buffer:
    """A tensor of some device, whose copies take a millisecond each; waiting for them takes ten more."""

    def __init__(self, device: str, clock: list[float]) -> None:
        self.device = torch.device(device)
        self.clock = clock

    def copy_(self, _: "Buffer") -> None:
        self.clock[0] += 1e-3


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [("cuda:0", "cuda:0", 1e-3 + 10e-3 / 20), ("cpu", "cuda:0", 11e-3), ("cuda:0", "cpu", 11e-3), ("cpu", "cpu", 1e-3)],
)
def test_copies_within_an_accelerator_share_one_wait(
    source: str, target: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def synchronize() -> None:
        clock[0] += 10e-3

    def measure(run: Callable[[], None], _: float) -> SimpleNamespace:
        before = clock[0]
        run()
        return SimpleNamespace(seconds=clock[0] - before)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr(bandwidth_trials, "measure", measure)
    found = bandwidth_trials._median_copy(Buffer(source, clock), Buffer(target, clock), min_seconds=0)
    assert found == pytest.approx(seconds)


def test_folder_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        check_folder(tmp_path / "nowhere", needed=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=250_000_000))
    with pytest.raises(UserError, match=r"needs 1\.07 GB, .* has 0\.25 GB free"):
        check_folder(tmp_path, needed=1024 * MiB)
    check_folder(tmp_path, needed=250_000_000)


def deny(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_script_tells_an_unwritable_folder_in_one_line(
    run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", deny)  # root may write anywhere, so file modes would not do
    result = run_script(SCRIPT, "--folder", tmp_path)
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr == (f"error: --folder: cannot write to {tmp_path}: Permission denied; name another folder\n")


def test_script_tells_a_full_disk_in_one_line(
    run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    result = run_script(SCRIPT, "--folder", tmp_path, "--quick", "true")
    assert (result.status, result.stderr.count("\n")) == (2, 1)
    assert "the test file needs 0.27 GB" in result.stderr

    def quota(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(bandwidth_trials, "_write", quota)  # there is room, but not for this user
    with pytest.raises(UserError, match=r"cannot write 0\.00 GB to .*: Disk quota exceeded"):
        list(measure_disk(tmp_path, MiB, seconds=1))


def test_script_prints_the_table_and_writes_the_record(run_script: Script, tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "out"
    folder.mkdir()
    result = run_script(SCRIPT, "--folder", folder, "--quick", "true", "--out", out)
    assert result.status == 0, result.stderr
    assert list(folder.iterdir()) == []
    record = json.loads((out / "bandwidth.json").read_text())
    assert {"date", "command", "hardware", "versions", "rows"} <= record.keys()
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[0] == "from, to" and "GB/s" in lines[0] and "hours per PB" in lines[0]
    for row, line in zip(record["rows"], lines[1:], strict=False):
        assert line.startswith(row["path"])
        if row["seconds"]:
            assert row["gb_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
            assert row["hours_per_petabyte"] * row["gb_per_second"] == pytest.approx(1e6 / 3600)
        else:
            assert row["note"].startswith("not measured")
    measured = {row["path"] for row in record["rows"] if row["seconds"]}
    assert {"disk, sequential write", "disk, random 4 KiB read", "memory copy, 1 thread"} <= measured
