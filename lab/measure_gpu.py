"""Fill a machine's record on a GPU within the minutes that there are: `python results/measure.py gpu --minutes 9`.

The rows of all lessons that one GPU can fill, most important first; on several GPUs also what several ranks are for.
Each is written as soon as it is there, and after each part of it, so that being cut off loses little. A row that no
longer fits into the time is left out and named. Rows that the record lacks come first: starting again goes on.

With --rehearse true every row runs on the CPU, with the least work, into a file that no page shows: runs/gpu_rehearsal.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lesson_runs import (
    BASELINE,
    LESSON_01,
    LESSON_02,
    LESSON_03,
    LESSON_04,
    RESULTS,
    TARGET,
    data_ladder,
    line_profile,
    prepare,
    study,
    time_to_target,
    train,
)
from record_file import machine_name, put_record, read_records
from trace_table import trace_table

from lab.flags import Parser, make_output_folder, require_positive
from workshop.errors import UserError
from workshop.hardware import cpu_or_error
from workshop.paths import default_data_dir, default_runs_dir

UNET = ("--config", "../configs/unet3d.yaml")
OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
TINY_UNET = (*UNET, "--config", "../configs/unet3d_tiny.yaml", "--crop_size", 8, "--width", 4, "--limit_val", 16)
FEW_DIGITS = ("--limit_train", 32, "--limit_val", 16, "--batch_size", 2)
AT_ONCE = ("--benchmark_seconds", 0.01)
SPARE_SECONDS = 5
"""at the end, to write the last part"""

Figures = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where figures go, and whether it is only a rehearsal."""

    file: Path
    rehearsal: bool = False

    def pick(self, rehearsed: tuple, measured: tuple) -> tuple:
        """Return the flags that suit."""
        return rehearsed if self.rehearsal else measured

    def study(self, lesson: Path, script: str, *flags: object, **how: Any) -> dict[str, Any]:  # noqa: ANN401
        """Run an experiment; its plot lies beside the file."""
        return study(lesson, script, *flags, machine=self.file.with_suffix(""), **how)


def precision_ladder(place: Place) -> Figures:
    """The full U-Net at 64^3 cells and batches of 64: what each option costs and gives."""
    flags = place.pick(("--quick", "true", "--trials", 2), ("--steps", 50, "--trial_seconds", 1))
    yield place.study(LESSON_04, "ladder.py", "--loader", "device", *flags, name="precision_ladder")


def unet3d_throughput(place: Place) -> Figures:
    """IO, SYNTHETIC and FULL of the full U-Net: with all options, also as a CUDA graph, and with none."""
    graph = ("--cuda_graph", "true")
    sets = {"options": OPTIONS, "options, CUDA graph": (*OPTIONS, *graph), "fp32": (*UNET, "--loader", "device")}
    if place.rehearsal:
        sets = {"options": (*TINY_UNET, "--loader", "device", "--precision", "bf16", "--channels_last", "true")}
    seconds = place.pick(AT_ONCE, ("--benchmark_seconds", 2))
    rows = {}
    for name, flags in sets.items():
        rows[name] = train(*flags, "--benchmark", "true", *seconds, lesson=LESSON_04)
        yield {"rows": rows}


def ladder(place: Place) -> Figures:
    """IO, SYNTHETIC and FULL on every rung of the data ladder, with their verdicts."""
    rungs = place.pick(("map",), ("map", "memory", "device", "shards", "dali"))
    have_dali = find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None
    have = {"dali": have_dali, "shards": find_spec("webdataset") is not None}
    missing = [rung for rung in rungs if not have.get(rung, True)]
    for found in data_ladder(
        [rung for rung in rungs if rung not in missing],
        *place.pick((*FEW_DIGITS, *AT_ONCE), ("--config", "../configs/cifar10.yaml", "--benchmark_seconds", 1)),
    ):
        yield found | {"not_installed": missing}


def baseline(place: Place) -> Figures:
    """Lesson 01 as it comes, under the line profiler."""
    yield line_profile(*BASELINE, *place.pick(FEW_DIGITS, ()))


def fast(place: Place) -> Figures:
    """Training seconds to 98 % accuracy, one round of all runs after the other."""
    if place.rehearsal:
        yield from time_to_target(1, *FEW_DIGITS, names=("baseline",), target=0.0)
    else:
        yield from time_to_target(3, target=TARGET)


def bandwidth(place: Place) -> Figures:
    """How fast data move: disk, memory, to the GPU and on it."""
    yield place.study(LESSON_01, "bandwidth.py", "--quick", "true")


def cpu_or_gpu(place: Place) -> Figures:
    """All computations of cpu_or_gpu.py."""
    which = place.pick(("--experiment", "elementwise"), ("--all",))
    yield place.study(LESSON_01, "cpu_or_gpu.py", *which, "--quick", "true")


def underflow(place: Place) -> Figures:
    """Gradients that 16 bits cannot hold, of the full U-Net."""
    flags = place.pick(("--quick", "true"), ("--steps", 50))
    yield place.study(LESSON_04, "underflow.py", "--loader", "device", *flags)


def tensor_cores(place: Place) -> Figures:
    """Matrix products of sizes that are multiples of 8, and others."""
    yield place.study(LESSON_04, "tensor_cores.py", *place.pick(("--quick", "true"), ()))


def trace(place: Place) -> Figures:
    """The kernels of a step of the full U-Net, without compilation, so that they have their own names."""
    full = (*OPTIONS, "--compile", "off", "--limit_train", 1280, "--limit_val", 64)
    flags = place.pick((*TINY_UNET, "--limit_train", 160), full)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *flags, "--epochs", 1, "--trace", "true", "--run_dir", folder]
        subprocess.run([str(word) for word in command], cwd=LESSON_04, check=True)
        yield trace_table(Path(folder) / "rank0.pt.trace.json.gz")


def compare(place: Place) -> Figures:
    """One GPU, DataParallel and DDP on the same work."""
    flags = ("--seconds", 0.01, "--limit_train", 32, "--global_batch_size", 1, "--ranks", 1)
    yield place.study(LESSON_02, "compare.py", *place.pick(flags, ("--rounds", 3, "--seconds", 1)))


def scaling(place: Place) -> Figures:
    """Weak and strong scaling over the GPUs."""
    flags = ("--quick", "true", "--max_ranks", 1, "--limit_train", 32, "--seconds", 0.01, "--batch_size", 1)
    yield place.study(LESSON_03, "scaling.py", *place.pick(flags, ("--rounds", 2, "--seconds", 1)))


def allreduce(place: Place) -> Figures:
    """All-reduce by message size, over all GPUs."""
    flags = place.pick(("--seconds", 0.001, "--max_mib", 0.25), ("--seconds", 0.2, "--max_mib", 256))
    yield place.study(LESSON_03, "allreduce.py", *flags, ranks=torch.cuda.device_count() or 2)


@dataclass(frozen=True)
class Row:
    """Something to measure: ``measure`` yields all its figures so far, and so again after each part."""

    measure: Callable[[Place], Figures]
    seconds: int
    """rough need on one GPU, before it has been measured there"""
    gpus: int = 1

    @property
    def name(self) -> str:
        """The experiment that its figures belong to."""
        return self.measure.__name__

    def lacks(self) -> str:
        """Say what this machine lacks for it; nothing, if it lacks nothing."""
        if self.measure is baseline and find_spec("line_profiler") is None:
            return "line_profiler is not installed"
        return ""


ROWS = (
    Row(precision_ladder, 180),
    Row(ladder, 110),
    Row(baseline, 30),
    Row(unet3d_throughput, 240),
    Row(fast, 150),
    Row(bandwidth, 30),
    Row(cpu_or_gpu, 60),
    Row(underflow, 60),
    Row(tensor_cores, 60),
    Row(trace, 40),
    Row(compare, 120, gpus=2),
    Row(allreduce, 60, gpus=2),
    Row(scaling, 240, gpus=2),
)
"""most important first"""


class TimeIsUp(Exception):
    """The minutes are over."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` inside the block after so many seconds; a process that it waits for is ended with it."""

    def end(*_: int | FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_rows(rows: list[Row], place: Place, deadline: float, command: str) -> dict[str, str]:
    """Measure in turn what fits until ``deadline``, of `time.monotonic`; return why the others were left out."""
    left_out = {}
    for row in rows:
        known = read_records(place.file).get(row.name, {})
        needed = 1 if place.rehearsal else known.get("row_seconds", row.seconds)
        left = deadline - time.monotonic() - SPARE_SECONDS
        if reason := row.lacks():
            left_out[row.name] = reason
        elif needed > left:
            left_out[row.name] = f"takes about {needed:.0f} s, and {max(left, 0):.0f} s are left"
        else:
            left_out |= _measure(row, place, left, command)
    return left_out


def _measure(row: Row, place: Place, seconds: float, command: str) -> dict[str, str]:
    print(f"\n== {row.name}: {row.measure.__doc__}", flush=True)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        with ended_after(seconds):
            for figures in row.measure(place):
                put_record(place.file, row.name, figures | {"unfinished": True}, command)
    except TimeIsUp:
        return {row.name: f"was cut off after {seconds:.0f} s{', a part of it is kept' if figures else ''}"}
    except (UserError, subprocess.CalledProcessError, AssertionError) as error:
        return {row.name: f"failed: {error}"}
    put_record(place.file, row.name, figures | {"row_seconds": round(time.monotonic() - started, 1)}, command)
    print(f"== {row.name}: written to {place.file} after {time.monotonic() - started:.0f} s", flush=True)
    return {}


def bring_data(rehearsal: bool) -> None:
    """Have the data sets generated that are not there, whatever they are where they are."""
    data_dir = default_data_dir()
    digits, cells = (("--train_samples", 640, "--val_samples", 128), 16) if rehearsal else ((), 256)
    if not (data_dir / "MNIST").exists():
        prepare("mnist", "--synthetic", *digits)
    if not rehearsal and not (data_dir / "cifar-10-batches-py").exists():
        prepare("cifar10", "--synthetic")
    images = "mnist" if rehearsal else "cifar10"
    if find_spec("webdataset") and not (data_dir / "shards" / images).exists():
        prepare(images, "--shards")
    if not (data_dir / "nbody").exists():
        prepare("nbody", "--synthetic", "--cells", cells)


def rehearse() -> Place:
    """Hide the GPUs and all CPUs but one, for all that is started too; point to data and files of its own."""
    folder = default_runs_dir() / "gpu_rehearsal"
    make_output_folder(folder)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"}
    os.environ["WORKSHOP_DATA"] = str(folder / "data")
    return Place(folder / "rehearsal.json", rehearsal=True)


def main(arguments: list[str]) -> None:
    """Measure what fits into the minutes; then tell what was left out, and why.

    Raises:
        UserError: there is no GPU, or rows have failed.
    """
    started = time.monotonic()
    parser = Parser(__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop in time (default: %(default)s)")
    parser.add_switch("--rehearse", "every row on the CPU, with the least work, into a file that no page shows")
    asked = parser.parse_args(arguments)
    require_positive(asked, "minutes")
    if not asked.rehearse and not torch.cuda.is_available():
        cpu_or_error()  # which says more, if a GPU was granted
        raise UserError("this machine has no NVIDIA GPU: try all rows on the CPU with --rehearse true")
    place = rehearse() if asked.rehearse else Place(RESULTS / f"{machine_name()}.json")
    records = read_records(place.file)
    gpus = torch.cuda.device_count()
    rows = [row for row in ROWS if row.gpus <= gpus or place.rehearsal]
    rows.sort(key=lambda row: row.name in records and "unfinished" not in records[row.name])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what was started, too
    bring_data(place.rehearsal)
    command = f"python results/measure.py gpu --minutes {asked.minutes:g}"
    left_out = measure_rows(rows, place, started + 60 * asked.minutes, command)
    print(f"\n{len(rows) - len(left_out)} of {len(rows)} rows measured: {place.file}")
    for name, reason in left_out.items():
        print(f"left out: {name} {reason}")
    if failed := [name for name, reason in left_out.items() if reason.startswith("failed")]:
        raise UserError(f"failed: {', '.join(failed)}; the lines above say why")
