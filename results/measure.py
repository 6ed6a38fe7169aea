"""Measure the figures of the READMEs on this machine and keep them in results/<machine>.json.

    python results/measure.py                    # every experiment
    python results/measure.py workers            # one of them
    python results/measure.py gpu --minutes 8    # on a machine with GPUs: the most important first, within that time

Run it on an idle machine, then `make docs` renders the figures into the pages.
"""

# ruff: noqa: E402, the clock starts before the imports, which take a while on a machine that reads them the first time
import time

STARTED = time.monotonic()

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gpu_day
import small_studies
from lesson_runs import (
    BASELINE,
    LESSON_01,
    LESSON_02,
    LESSON_03,
    LESSON_04,
    RESULTS,
    data_ladder,
    last,
    line_profile,
    prepare,
    study,
    time_to_target,
    train,
)
from record_file import machine_name, put_record, read_records
from workshop.errors import UserError, nearest, run_reporting_user_errors
from workshop.hardware import available_cpus
from workshop.loaders import build_loaders
from workshop.measuring.flags import Parser
from workshop.measuring.launching import check_flags
from workshop.paths import REPOSITORY

TINY_UNET = ("--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml")


@contextmanager
def ranks_of_gpus() -> Iterator[int]:
    """Give how many GPUs there are for ranks; where it is one, hide it, and let CPUs be the devices."""
    gpus = torch.cuda.device_count()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus == 1:
        print("one GPU has nobody to exchange anything with: measured with ranks on CPUs", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield gpus if gpus > 1 else 0
    finally:
        if gpus == 1:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def baseline() -> dict[str, Any]:
    """Lesson 01 as it comes: one epoch under the line profiler."""
    return line_profile(*BASELINE)


def workers() -> dict[str, Any]:
    """Lesson 01 with more and more processes that load data."""
    rows = []
    for num_workers in [0, *(2**i for i in range(available_cpus().bit_length()))]:
        epoch = train("--num_workers", num_workers, "--limit_train", 20000, "--limit_val", 1000)["epochs"][0]
        rows.append({"num_workers": num_workers, "samples_per_second": epoch["samples_per_second"]})
    return {"rows": rows}


def loading_timelines() -> dict[str, Any]:
    """Lesson 01's steps on a time line, with 0, 1 and 4 processes that load data."""
    prepare("cifar10", "--synthetic")
    return study(LESSON_01, "loading_timelines.py")


def bucket_timelines() -> dict[str, Any]:
    """Lesson 03's all-reduces during backward, in one bucket and in many."""
    prepare("cifar10", "--synthetic")
    return study(LESSON_03, "bucket_timelines.py")


def ladder() -> dict[str, Any]:
    """IO, SYNTHETIC and FULL throughput on every rung of the data ladder, and of ``map`` without a worker, first."""
    prepare("cifar10", "--synthetic", "--shards")
    flags = ("--config", "../configs/cifar10.yaml", "--benchmark_seconds", 3)
    alone = {"map, 0 workers": train("--benchmark", "true", "--num_workers", 0, "--loader", "map", *flags)}
    rungs = ("map", "shards", "memory", "device", "dali")
    found = last(data_ladder(rungs, *flags))
    if failed := found.get("failed"):
        raise UserError("; ".join(f"{loader}: {why}" for loader, why in failed.items()))
    return {"rungs": alone | found["rungs"], "num_workers": found["num_workers"]}


def fast() -> dict[str, Any]:
    """Training seconds to 98 % accuracy: of lesson 01, also on fewer samples, and of mnist_fast.yaml, in turn."""
    return last(time_to_target(rounds=3))


def success_rate() -> dict[str, Any]:
    """How many of 20 seeds mnist_fast.yaml takes to 98 %, and how soon, beside lesson 01."""
    return study(LESSON_04, "success_rate.py", "--seeds_of_others", 3)


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
    with ranks_of_gpus():
        return study(LESSON_03, "scaling.py", "--rounds", 3, "--seconds", 2)


def allreduce() -> dict[str, Any]:
    """All-reduce by message size, over a rank per GPU, else two ranks of one thread (what torchrun sets)."""
    with ranks_of_gpus() as gpus:
        return study(LESSON_03, "allreduce.py", "--seconds", 0.5, ranks=gpus or 2)


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


def line_fit() -> dict[str, Any]:
    """A line fitted to noisy samples by gradient descent."""
    return study(LESSON_01, "line_fit.py")


def survive() -> dict[str, Any]:
    """What a step costs more because the run survives, on two ranks."""
    with ranks_of_gpus():
        return study(LESSON_03, "end_step.py", *BASELINE, "--loader", "memory", ranks=2)


def precision_ladder() -> dict[str, Any]:
    """What each option of lesson 04 costs and gives."""
    prepare("nbody", "--synthetic")
    return study(LESSON_04, "ladder.py", name="precision_ladder")


def underflow() -> dict[str, Any]:
    """Gradients that 16 bits cannot hold."""
    prepare("nbody", "--synthetic")
    return study(LESSON_04, "underflow.py")


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
    prepare("nbody", "--synthetic")
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
        small_studies.worker_counts,
        small_studies.threads,
        small_studies.models,
        small_studies.cifar_loading,
        loading_timelines,
        ladder,
        fast,
        success_rate,
        cpu_or_gpu,
        bandwidth,
        sequential_reads,
        compare,
        scaling,
        allreduce,
        bucket_timelines,
        convergence,
        small_studies.batches,
        small_studies.higher_rate,
        small_studies.exercises,
        line_fit,
        small_studies.ddp_options,
        survive,
        precision_ladder,
        underflow,
        tensor_cores,
        unet3d,
    )
}


def measure(names: list[str], file: Path) -> None:
    """Run experiments and put the figures of each into the file at once; what cannot be measured here is told.

    Raises:
        UserError: some of them could not be measured.
    """
    missing = []
    for name in names:
        try:
            put_record(file, name, EXPERIMENTS[name](), f"python results/measure.py {name}")
            print(f"{name}: written to {file.relative_to(REPOSITORY)}", flush=True)
        except (UserError, subprocess.CalledProcessError) as error:
            missing.append(name)
            print(f"{name}: not measured: {error}", file=sys.stderr, flush=True)
    if missing:
        raise UserError(f"not measured: {', '.join(missing)}; the lines above say why")


def main() -> None:
    """Run the experiments named on the command line, or all; merge their figures into this machine's file."""
    if sys.argv[1:2] == ["gpu"]:
        gpu_day.main(sys.argv[2:], STARTED)
        return
    parser = Parser(__doc__)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"some of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--machine", default=machine_name(), help="name of the file (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := next((name for name in arguments.experiments if name not in EXPERIMENTS), None):
        raise UserError(f"no experiment '{unknown}'; {nearest(unknown, EXPERIMENTS)}")
    file = RESULTS / f"{arguments.machine}.json"
    read_records(file)  # now, not after minutes
    measure(arguments.experiments or list(EXPERIMENTS), file)


if __name__ == "__main__":
    run_reporting_user_errors(main)
