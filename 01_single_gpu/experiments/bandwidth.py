"""How fast do data move on this machine, and how long would a petabyte take?

    python experiments/bandwidth.py                        # the disk that holds the data sets, memory, accelerator
    python experiments/bandwidth.py --folder $TMPDIR       # another disk

You should see each path that data take to the place where they are computed with, and that they differ by orders of
magnitude: training can be no faster than the slowest of them allows. GB are 1e9 bytes, a PB is 1e15; the table says for
each row which bytes are counted. Before the disk is read, the system is asked to forget its copy of the file in memory.
(What lies further down, a controller or a file server, may still have one.)
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from lab import results
from lab.flags import Parser
from lab.timing import measure
from workshop.errors import UserError, run_reporting_user_errors, warn
from workshop.hardware import available_cpus, pick_device
from workshop.paths import default_data_dir

MiB = 2**20
WRITE_BLOCK, READ_BLOCK, RANDOM_BLOCK = 64 * MiB, 8 * MiB, 4096
"""bytes that are written or read at a time"""
COPIES_PER_WAIT = 20
"""copies within an accelerator's memory that are started before the CPU waits for all of them"""
DEVICE_PATHS = (
    *("host to device, pageable", "host to device, pinned", "device to host, pageable", "device to host, pinned"),
    "device to device",
)
Row = list[results.Cell]


def row_of(path: str, counted: str, size: int, seconds: float) -> Row:
    """Return a row of the table: GB/s, and how many hours 1e15 bytes take."""
    return [path, counted, size / 1e9 / seconds, 1e15 / size * seconds / 3600]


def until_done(path: str, counted: str, transfer: Callable[[], int], seconds: float) -> Row:
    """Call ``transfer``, which returns the bytes that it has moved, until it returns 0 or the time is over."""
    total, started, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds and (moved := transfer()):
        total += moved
        elapsed = time.perf_counter() - started
    return row_of(path, counted, total, elapsed)


def measure_disk(folder: Path, size: int, seconds: float) -> list[Row]:
    """Write a file of ``size`` bytes and read it back, in sequence and at random places, ``seconds`` each at most.

    Raises UserError: the folder is missing, cannot be written to, or is full.
    """
    rng = np.random.default_rng(0)
    block, buffer = rng.bytes(min(WRITE_BLOCK, size)), bytearray(READ_BLOCK)  # random, because some disks compress
    try:
        # The file has no name, so it cannot outlive this process.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

            def write() -> int:
                written = file.write(block) if file.tell() < size else 0
                os.fsync(file.fileno())  # otherwise it is in memory only
                return written

            def forget() -> None:
                file.seek(0)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    warn("this system cannot be asked to forget a file: what is read may come from memory")

            rows = [until_done("disk, sequential write", "written", write, seconds)]
            forget()
            rows.append(until_done("disk, sequential read", "read", lambda: file.readinto(buffer), seconds))
            forget()
            places = iter(rng.permutation(os.fstat(file.fileno()).st_size // RANDOM_BLOCK).tolist())

            def read_one() -> int:
                place = next(places, None)
                return 0 if place is None else len(os.pread(file.fileno(), RANDOM_BLOCK, place * RANDOM_BLOCK))

            return [*rows, until_done("disk, random 4 KiB read", "read", read_one, seconds)]
    except OSError as error:
        raise UserError(f"--folder: cannot write {size / 1e9:.2f} GB to {folder}: {error.strerror}") from None


def seconds_of_copy(source: torch.Tensor, target: torch.Tensor, seconds: float) -> float:
    """Return the seconds that a copy takes: the median of several, which take about ``seconds`` together."""
    devices = {source.device, target.device}
    # A copy within an accelerator's memory takes so little time that starting it and waiting for its end would show.
    copies = COPIES_PER_WAIT if len(devices) == 1 and source.device.type != "cpu" else 1

    def run() -> None:
        for _ in range(copies):
            target.copy_(source)
        if devices != {torch.device("cpu")}:
            torch.accelerator.synchronize()

    run()  # warm-up
    return measure(run, seconds).seconds / copies


def measure_memory(size: int, seconds: float) -> list[Row]:
    """Copy ``size`` bytes within the CPU's memory, with one thread and with all."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    rows = []
    for threads in sorted({1, available_cpus()}):
        with threadpool_limits(threads):
            taken = seconds_of_copy(source, target, seconds)
        path = f"memory copy, {threads} thread{'s' if threads > 1 else ''}"
        rows.append(row_of(path, "read + written", 2 * size, taken))
    return rows


def measure_device(device: torch.device, size: int, seconds: float) -> list[Row]:
    """Copy ``size`` bytes to the accelerator, back, and within its memory; without one, say that it was not measured.

    Pageable is ordinary memory, which the driver first copies to a place that the system cannot move. Pinned memory
    is such a place.
    """
    if device.type != "cuda":
        return [[path, None, "not measured", None] for path in DEVICE_PATHS]
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned, here = pageable.pin_memory(), torch.ones_like(pageable, device=device)
    copies = ((pageable, here), (pinned, here), (here, pageable), (here, pinned))
    rows = [
        row_of(path, "copied", size, seconds_of_copy(source, target, seconds))
        for path, (source, target) in zip(DEVICE_PATHS, copies, strict=False)
    ]
    within = seconds_of_copy(here, torch.ones_like(here), seconds)
    return [*rows, row_of(DEVICE_PATHS[-1], "read + written", 2 * size, within)]


def main() -> None:
    """Measure every path and store the table."""
    parser = Parser(__doc__)
    folder = default_data_dir()
    parser.add_argument("--folder", type=Path, default=folder, help="on the disk to measure (default: %(default)s)")
    parser.add_argument("--quick", choices=("true", "false"), default="false", help="a quarter of the bytes")
    arguments = parser.parse_args()
    quick = arguments.quick == "true"
    size = 256 * MiB if quick else 1024 * MiB
    disk_seconds, copy_seconds = (1.5, 0.3) if quick else (5.0, 1.0)
    rows = measure_disk(arguments.folder, size, disk_seconds) + measure_memory(size, copy_seconds)
    results.store(
        "bandwidth",
        title="Bandwidths of this machine",
        columns=["path", "bytes counted", "GB/s", "hours per PB"],
        rows=rows + measure_device(pick_device(), size, copy_seconds),
        formats={"GB/s": ",.2f", "hours per PB": ",.0f"},
        spread="each path was measured once",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
