"""Running the lessons and their experiments for their figures: what all measurements share."""

import linecache
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from record_file import machine_name

from lab.launching import read_record, torchrun
from workshop.hardware import emulates, pick_device
from workshop.paths import REPOSITORY

TARGET = 0.98
RESULTS = REPOSITORY / "results"
LESSON_01 = REPOSITORY / "01_single_gpu"
LESSON_02 = REPOSITORY / "02_dataparallel"
LESSON_03 = REPOSITORY / "03_ddp"
LESSON_04 = REPOSITORY / "04_mixed_precision"
BASELINE = ("--config", "../configs/mnist.yaml")
FAST = (*BASELINE, "--config", "../configs/mnist_fast.yaml")
TO_TARGET = {
    "baseline": (LESSON_01, BASELINE),
    "fewer": (LESSON_01, (*BASELINE, "--limit_train", 40000)),
    "fast": (LESSON_04, FAST),
    "fast_fp32": (LESSON_04, (*FAST, "--precision", "fp32")),
}
"""lesson and flags of the runs whose seconds to `TARGET` are compared; the first is what others are compared with"""


def train(*flags: object, lesson: Path = LESSON_01, launcher: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """Train a lesson; return its summary."""
    return read_record([*launcher, "train.py", *flags], lesson, flag="--run_dir", show=True)


def study(
    lesson: Path, script: str, *flags: object, name: str | None = None, ranks: int = 1, machine: Path | None = None
) -> dict[str, Any]:
    """Run an experiment of a lesson; return its record, and keep its plot, if it draws one, under the machine's name.

    The plot is further named after the script, or ``name``; it lies beside the file ``machine`` (default: that of this
    machine in results/).
    """
    start = [sys.executable] if ranks == 1 else torchrun(ranks)
    with tempfile.TemporaryDirectory() as plots:
        figures = read_record([*start, f"experiments/{script}", *flags], lesson, show=True, plots=Path(plots))
        for plot in Path(plots).glob("*.png"):
            beside = machine or RESULTS / machine_name()
            shutil.copy(plot, beside.with_name(f"{beside.name}_{name or plot.stem}.png"))
    for path in ("data_dir", "run_dir", "out"):  # of this machine
        figures.get("config", {}).pop(path, None)
    return figures


def prepare(*words: object) -> None:
    """Have a data set prepared; one that is there is left alone."""
    subprocess.run([sys.executable, "data/prepare.py", *map(str, words)], cwd=REPOSITORY, check=True)


def line_profile(*flags: object) -> dict[str, Any]:
    """Run lesson 01 under the line profiler; return its first epoch and the time of each line."""
    import line_profiler  # not every machine has it

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "train.lprof"
        summary = train(*flags, launcher=(sys.executable, "-m", "kernprof", "-l", "-o", str(profile)))
        stats = line_profiler.load_stats(str(profile))
    ((file, first_line, function), timings) = next(item for item in stats.timings.items() if item[1])
    total = sum(time for _, _, time in timings)
    lines = [
        {
            "line": line,
            "hits": hits,
            "seconds": time * stats.unit,
            "percent": 100 * time / total,
            "text": linecache.getline(str(LESSON_01 / file), line).rstrip(),
        }
        for line, hits, time in timings
    ]
    return {"epoch": summary["epochs"][0], "function": function, "first_line": first_line, "lines": lines}


def data_ladder(rungs: Sequence[str], *flags: object) -> Iterator[dict[str, Any]]:
    """Measure IO, SYNTHETIC and FULL throughput rung by rung, each with one worker; yield all there is after each."""
    found = {}
    for rung in rungs:
        found[rung] = train("--benchmark", "true", "--num_workers", 1, *flags, "--loader", rung)
        yield {"rungs": found}


def time_to_target(
    rounds: int, *flags: object, names: Sequence[str] = tuple(TO_TARGET), target: float = TARGET
) -> Iterator[dict[str, Any]]:
    """Train what ``names`` of `TO_TARGET` say in turn, so many rounds; yield all there is after each."""
    configurations = {name: TO_TARGET[name] for name in names}
    imitated = None
    if "fast" in names and emulates(pick_device(), "bf16"):  # it would take too long: a glimpse will do
        lesson, fast_flags = configurations.pop("fast")
        glimpse = train(*fast_flags, "--limit_train", 1280, "--limit_val", 500, *flags, lesson=lesson)
        imitated = glimpse["epochs"][0]["samples_per_second"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in configurations}
    for _ in range(rounds):
        for name, (lesson, own_flags) in configurations.items():
            summary = train(*own_flags, *flags, lesson=lesson)
            (epoch,) = summary["epochs"]
            assert epoch["val_accuracy"] >= target, f"{name} did not reach {target:.0%} in one epoch"
            kept = {key: epoch[key] for key in ("seconds", "samples_per_second", "val_accuracy")}
            runs[name].append(kept | {"first_step_seconds": summary["first_step_seconds"]})
        medians = {name: statistics.median(run["seconds"] for run in measured) for name, measured in runs.items()}
        speedup = {name: medians["baseline"] / medians[name] for name in runs}
        yield {"target": target, "runs": runs, "speedup": speedup, "imitated_bf16_samples_per_second": imitated}
