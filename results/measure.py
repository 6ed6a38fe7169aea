"""Measure the figures of the READMEs on this machine and keep them in results/<machine>.json.

    python results/measure.py              # every experiment
    python results/measure.py workers      # one of them

Run it on an idle machine, then `make docs` renders the figures into the pages.
"""

import argparse
import json
import linecache
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import line_profiler
import torch
import torch.nn.functional as F

from workshop.hardware import available_cpus, describe_hardware, describe_versions, only_imitates, pick_device
from workshop.loaders import build_loaders
from workshop.measuring.launching import check_flags, read_record, torchrun
from workshop.paths import REPOSITORY

TARGET = 0.98
RESULTS = REPOSITORY / "results"
LESSON_01 = REPOSITORY / "01_single_gpu"
LESSON_02 = REPOSITORY / "02_dataparallel"
LESSON_03 = REPOSITORY / "03_ddp"
LESSON_04 = REPOSITORY / "04_mixed_precision"
TINY_UNET = ("--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml")
BASELINE = ("--config", "../configs/mnist.yaml")
FAST = (*BASELINE, "--config", "../configs/mnist_fast.yaml")


def train(*flags: object, lesson: Path = LESSON_01, launcher: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """Train a lesson; return its summary."""
    return read_record([*launcher, "train.py", *flags], lesson, flag="--run_dir", show=True)


def study(
    lesson: Path, script: str, *flags: object, name: str | None = None, data: str | None = None, ranks: int = 1
) -> dict[str, Any]:
    """Run an experiment of a lesson; return its record, and keep its plot, if it draws one, under this machine's name.

    The plot is further named after the script, or ``name``; ``data`` is a data set to generate before.
    """
    if data:
        subprocess.run([sys.executable, "data/prepare.py", data, "--synthetic"], cwd=REPOSITORY, check=True)
    start = [sys.executable] if ranks == 1 else torchrun(ranks)
    with tempfile.TemporaryDirectory() as plots:
        figures = read_record([*start, f"experiments/{script}", *flags], lesson, show=True, plots=Path(plots))
        for plot in Path(plots).glob("*.png"):
            shutil.copy(plot, RESULTS / f"{machine_name()}_{name or plot.stem}.png")
    for path in ("data_dir", "run_dir", "out"):  # of this machine
        figures.get("config", {}).pop(path, None)
    return figures


def baseline() -> dict[str, Any]:
    """Lesson 01 as it comes: one epoch under the line profiler."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "train.lprof"
        summary = train(*BASELINE, launcher=(sys.executable, "-m", "kernprof", "-l", "-o", str(profile)))
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


def workers() -> dict[str, Any]:
    """Lesson 01 with more and more processes that load data."""
    rows = []
    for num_workers in [0, *(2**i for i in range(available_cpus().bit_length()))]:
        epoch = train("--num_workers", num_workers, "--limit_train", 20000, "--limit_val", 1000)["epochs"][0]
        rows.append({"num_workers": num_workers, "samples_per_second": epoch["samples_per_second"]})
    return {"rows": rows}


def loading_timelines() -> dict[str, Any]:
    """Lesson 01's steps on a time line, with 0, 1 and 4 processes that load data."""
    return study(LESSON_01, "loading_timelines.py", data="cifar10")


def bucket_timelines() -> dict[str, Any]:
    """Lesson 03's all-reduces during backward, in one bucket and in many."""
    return study(LESSON_03, "bucket_timelines.py", data="cifar10")


def ladder() -> dict[str, Any]:
    """IO, SYNTHETIC and FULL throughput on every rung of the data ladder, and of ``map`` without a worker, first."""
    command = [sys.executable, "data/prepare.py", "cifar10", "--synthetic", "--shards"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    flags = ("--config", "../configs/cifar10.yaml", "--benchmark", "true", "--benchmark_seconds", 3)
    rungs = ("map", "shards", "memory", "device", "dali")
    rows = {"map, 0 workers": train(*flags, "--loader", "map", "--num_workers", 0)}
    return {"rungs": rows | {rung: train(*flags, "--loader", rung) for rung in rungs}}


def fast() -> dict[str, Any]:
    """Training seconds to 98 % accuracy: of lesson 01, also on fewer samples, and of mnist_fast.yaml, in turn."""
    configurations = {
        "baseline": (LESSON_01, BASELINE),
        "fewer": (LESSON_01, (*BASELINE, "--limit_train", 40000)),
        "fast": (LESSON_04, FAST),
        "fast_fp32": (LESSON_04, (*FAST, "--precision", "fp32")),
    }
    imitated = None
    if only_imitates(pick_device(), "bf16"):  # it would take ten times as long: a glimpse will do
        lesson, flags = configurations.pop("fast")
        glimpse = train(*flags, "--limit_train", 1280, "--limit_val", 500, lesson=lesson)
        imitated = glimpse["epochs"][0]["samples_per_second"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in configurations}
    for _ in range(3):
        for name, (lesson, flags) in configurations.items():
            (epoch,) = train(*flags, lesson=lesson)["epochs"]
            assert epoch["val_accuracy"] >= TARGET, f"{name} did not reach {TARGET:.0%} in one epoch"
            runs[name].append({key: epoch[key] for key in ("seconds", "samples_per_second", "val_accuracy")})
    medians = {name: statistics.median(run["seconds"] for run in measured) for name, measured in runs.items()}
    speedup = {name: medians["baseline"] / medians[name] for name in runs}
    return {"target": TARGET, "runs": runs, "speedup": speedup, "imitated_bf16_samples_per_second": imitated}


def cpu_or_gpu() -> dict[str, Any]:
    """All computations of cpu_or_gpu.py, as the lesson runs them."""
    return study(LESSON_01, "cpu_or_gpu.py", "--all", "--quick", "true")


def bandwidth() -> dict[str, Any]:
    """This machine's row of the bandwidth table."""
    return study(LESSON_01, "bandwidth.py")


def sequential_reads() -> dict[str, Any]:
    """Shards against single files, from disk."""
    return study(LESSON_01, "sequential_reads.py")


def compare() -> dict[str, Any]:
    """One device, DataParallel and DDP on the same work."""
    return study(LESSON_02, "compare.py", "--rounds", 3, "--seconds", 2)


def scaling() -> dict[str, Any]:
    """Weak and strong scaling over the ranks of this machine."""
    return study(LESSON_03, "scaling.py", "--rounds", 3, "--seconds", 2)


def allreduce() -> dict[str, Any]:
    """All-reduce by message size, over a rank per GPU, else two ranks of one thread (what torchrun sets)."""
    return study(LESSON_03, "allreduce.py", "--seconds", 0.5, ranks=torch.cuda.device_count() or 2)


def convergence() -> dict[str, Any]:
    """Lesson 03's batch of 64 against 512, with three seeds; the plot and the example logs are those of the first."""
    records = []
    for seed in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "experiments/convergence.py", "--seed", str(seed), "--out", folder]
            subprocess.run(command, cwd=LESSON_03, check=True)
            records.append(json.loads((Path(folder) / "convergence.json").read_text()))
            if seed == 1:
                shutil.copy(Path(folder) / "convergence.png", RESULTS / f"{machine_name()}_convergence.png")
                for events in Path(folder).glob("*/events.out.tfevents.*"):
                    example = RESULTS / "example_logs" / events.parent.name / "events.out.tfevents.0.example"
                    example.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(events, example)  # its own name would tell the name of this machine
    return {
        "studies": [{key: record[key] for key in ("target_val_loss", "conclusions", "curves")} for record in records]
    }


def survive() -> dict[str, Any]:
    """What a step costs more because the run survives, on two ranks."""
    return study(LESSON_03, "end_step.py", *BASELINE, "--loader", "memory", ranks=2)


def precision_ladder() -> dict[str, Any]:
    """What each option of lesson 04 costs and gives."""
    return study(LESSON_04, "ladder.py", name="precision_ladder", data="nbody")


def underflow() -> dict[str, Any]:
    """Gradients that 16 bits cannot hold."""
    return study(LESSON_04, "underflow.py", data="nbody")


def tensor_cores() -> dict[str, Any]:
    """Matrix products of sizes that are multiples of 8, and others."""
    return study(LESSON_04, "tensor_cores.py")


def trivial_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error, (), of a prediction that needs no network, to be beaten by any that has one.

    It says that the gas is where the dark matter is, moves as it does, and has the same temperature everywhere.

    Args:
        inputs: (N, 4, X, Y, Z).
        targets: (N, 5, X, Y, Z).
    """
    return F.l1_loss(torch.cat([inputs, torch.zeros_like(targets[:, 4:])], dim=1), targets)


def unet3d() -> dict[str, Any]:
    """The tiny U-Net in each number format that a CPU has, against a predictor that copies what it is given."""
    subprocess.run([sys.executable, "data/prepare.py", "nbody", "--synthetic"], cwd=REPOSITORY, check=True)
    files = [word.replace("..", str(REPOSITORY)) for word in TINY_UNET]
    batches = list(build_loaders(check_flags(LESSON_04, files), torch.device("cpu"))[1])
    trivial = trivial_loss(*(torch.cat(parts) for parts in zip(*batches, strict=True))).item()
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        epochs = train(*TINY_UNET, "--precision", precision, lesson=LESSON_04)["epochs"]
        seconds = sum(epoch["seconds"] for epoch in epochs)
        rows.append({"precision": precision, "val_loss": epochs[-1]["val_loss"], "seconds": seconds})
    return {"trivial_loss": trivial, "rows": rows}


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    experiment.__name__: experiment
    for experiment in (
        baseline,
        workers,
        loading_timelines,
        ladder,
        fast,
        cpu_or_gpu,
        bandwidth,
        sequential_reads,
        compare,
        scaling,
        allreduce,
        bucket_timelines,
        convergence,
        survive,
        precision_ladder,
        underflow,
        tensor_cores,
        unet3d,
    )
}


def machine_name() -> str:
    """Return a file name for this machine: its accelerator's name, else its processor's with what it can and has."""
    hardware = describe_hardware(pick_device())
    name = hardware.get("device_name") or "{cpu} {cpu_instructions} {cpus_available}cpu".format(**hardware)
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def main() -> None:
    """Run the experiments named on the command line and merge their figures into this machine's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"some of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--machine", default=machine_name(), help="name of the file (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"unknown experiment {', '.join(sorted(unknown))}; known are: {', '.join(EXPERIMENTS)}")

    file = RESULTS / f"{arguments.machine}.json"
    for name in arguments.experiments or EXPERIMENTS:
        figures = EXPERIMENTS[name]()
        record = json.loads(file.read_text()) if file.exists() else {}
        record[name] = figures | {
            "date": date.today().isoformat(),
            "command": f"python results/measure.py {name}",
            "hardware": describe_hardware(pick_device()),
            "versions": describe_versions(),
        }
        file.write_text(json.dumps(record, indent=2) + "\n")
        print(f"{name}: written to {file.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
