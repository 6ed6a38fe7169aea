"""How fast data move on this machine: from disk, within memory, to the accelerator and within it."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from workshop.errors import UserError
from workshop.hardware import available_cpus
from workshop.measuring.timing import measure

MiB = 2**20
WRITE_BLOCK = 64 * MiB
"""written, and then forced to the disk, at a time: so that a slow disk can be stopped in time"""
READ_BLOCK = 8 * MiB
RANDOM_BLOCK = 4096
COPIES_PER_WAIT = 20
"""copies within an accelerator's memory that are started before the CPU waits for all of them"""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """One row of the table."""

    path: str
    """from where to where"""
    counted: str = ""
    """which bytes count: a copy within one memory reads and writes each of them"""
    bytes: int = 0
    seconds: float | None = None
    """None where it was not measured"""
    note: str = ""

    @property
    def gb_per_second(self) -> float | None:
        """Counted bytes per second, in units of 1e9."""
        return self.bytes / 1e9 / self.seconds if self.seconds else None

    @property
    def hours_per_petabyte(self) -> float | None:
        """How long 1e15 counted bytes take."""
        return 1e15 / self.bytes * self.seconds / 3600 if self.seconds else None


# --- disk -----------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, needed: int) -> None:
    """See that a file of ``needed`` bytes can be made in ``folder``.

    Raises:
        UserError: no such folder, not writable, or not enough free space.
    """
    if not folder.is_dir():
        raise UserError(f"--folder: {folder} is not a folder; name one on the disk to measure")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--folder: cannot write to {folder}: {error.strerror}; name another folder") from None
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"--folder: the test file needs {needed / 1e9:.2f} GB, {folder} has {free / 1e9:.2f} GB free; make room "
            f"or name a folder on another disk"
        )


def measure_disk(folder: Path, file_bytes: int, seconds: float) -> Iterator[Bandwidth]:
    """Write a file and read it back, in sequence and at random places; it is gone afterwards, whatever happens.

    Args:
        folder: on the disk to measure.
        file_bytes: size of the file.
        seconds: stop each measurement after about as long, even if it is not through.

    Raises:
        UserError: the disk is full, or a quota used up.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # without a name: it cannot outlive this process
        try:
            written = _write(file, file_bytes, seconds)
        except OSError as error:
            raise UserError(f"--folder: cannot write {file_bytes / 1e9:.2f} GB to {folder}: {error.strerror}") from None
        yield written
        yield _read_in_sequence(file, seconds, _drop_from_page_cache(file))
        yield _read_at_random(file, seconds, _drop_from_page_cache(file))


def _write(file: FileIO, file_bytes: int, seconds: float) -> Bandwidth:
    block = np.random.default_rng(0).bytes(min(WRITE_BLOCK, file_bytes))  # random: some disks compress
    written, started = 0, time.perf_counter()
    while written < file_bytes:
        written += file.write(block)
        os.fsync(file.fileno())  # else it is in memory only
        if time.perf_counter() - started > seconds:
            break
    elapsed = time.perf_counter() - started
    note = f"{len(block) / MiB:g} MiB at a time, each forced to the disk"
    return Bandwidth(path="disk, sequential write", counted="written", bytes=written, seconds=elapsed, note=note)


def _read_in_sequence(file: FileIO, seconds: float, note: str) -> Bandwidth:
    buffer = bytearray(READ_BLOCK)
    file.seek(0)
    read, started = 0, time.perf_counter()
    while n := file.readinto(buffer):
        read += n
        if time.perf_counter() - started > seconds:
            break
    elapsed = time.perf_counter() - started
    return Bandwidth(path="disk, sequential read", counted="read", bytes=read, seconds=elapsed, note=note)


def _read_at_random(file: FileIO, seconds: float, note: str) -> Bandwidth:
    blocks = os.fstat(file.fileno()).st_size // RANDOM_BLOCK
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    reads, started = 0, time.perf_counter()
    for place in np.random.default_rng(0).permutation(blocks).tolist():  # no place twice
        os.pread(file.fileno(), RANDOM_BLOCK, place * RANDOM_BLOCK)
        reads += 1
        if time.perf_counter() - started > seconds:
            break
    elapsed = time.perf_counter() - started
    note = f"{reads:,} reads, one after another, {elapsed / reads * 1e6:,.0f} µs each; {note}"
    path = "disk, random 4 KiB read"
    return Bandwidth(path=path, counted="read", bytes=reads * RANDOM_BLOCK, seconds=elapsed, note=note)


def _drop_from_page_cache(file: FileIO) -> str:
    """Make the system forget its copy of this file in memory; say in words whether it did."""
    if not hasattr(os, "posix_fadvise"):
        return "page cache not dropped: may be memory's speed"
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        # Read without waiting: only what is in memory can be read so.
        os.preadv(file.fileno(), [bytearray(RANDOM_BLOCK)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return "page cache dropped"
    except OSError:
        return "page cache dropped, if this kind of file system can: else it is memory's speed"
    return "page cache not dropped: may be memory's speed"


# --- memory and accelerator -----------------------------------------------------------------------------------------


def measure_memory(size: int, min_seconds: float) -> Iterator[Bandwidth]:
    """Copy ``size`` bytes within the CPU's memory, on one thread and on all."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    for threads in sorted({1, available_cpus()}):
        with threadpool_limits(threads):
            seconds = _median_copy(source, target, min_seconds)
        path = f"memory copy, {threads} thread{'s' if threads > 1 else ''}"
        yield Bandwidth(path=path, counted="read + written", bytes=2 * size, seconds=seconds)


def measure_device(device: torch.device, size: int, min_seconds: float) -> Iterator[Bandwidth]:
    """Copy ``size`` bytes to the accelerator, back, and within its memory; rows without figures where there is none.

    Pageable is ordinary memory, which the driver first copies to a place that the system cannot move. Pinned memory
    is such a place.
    """
    paths = (
        "host to device, pageable",
        "host to device, pinned",
        "device to host, pageable",
        "device to host, pinned",
        "device to device",
    )
    if device.type == "cpu":
        yield from (Bandwidth(path=path, note="not measured: no accelerator") for path in paths)
        return
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = pageable.pin_memory() if device.type == "cuda" else None
    here, there = torch.ones_like(pageable, device=device), torch.ones_like(pageable, device=device)
    copies = ((pageable, here), (pinned, here), (here, pageable), (here, pinned), (here, there))
    for path, (source, target) in zip(paths, copies, strict=True):
        if source is None or target is None:
            yield Bandwidth(path=path, note=f"not measured: no pinned memory with {device.type}")
            continue
        seconds = _median_copy(source, target, min_seconds)
        if source.device == target.device:
            yield Bandwidth(path=path, counted="read + written", bytes=2 * size, seconds=seconds)
        else:
            yield Bandwidth(path=path, counted="copied", bytes=size, seconds=seconds)


def _median_copy(source: torch.Tensor, target: torch.Tensor, min_seconds: float) -> float:
    """Return the seconds that a copy takes: the median of several measurements, after a warm-up."""
    asynchronous = source.device.type != "cpu" or target.device.type != "cpu"
    # A copy within an accelerator's memory takes so little time that starting it and waiting for its end would show.
    copies = COPIES_PER_WAIT if asynchronous and source.device == target.device else 1

    def run() -> None:
        for _ in range(copies):
            target.copy_(source)
        if asynchronous:
            torch.accelerator.synchronize()

    run()  # warm-up
    return measure(run, min_seconds).seconds / copies
