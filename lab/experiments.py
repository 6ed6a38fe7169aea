"""The experiments whose figures the pages show, in one table: what each of them runs on CPUs, on GPUs, in a rehearsal.

`measure.py` measures them one after the other; `measure_gpu.py` measures on GPUs what fits into the time that there is.
A rehearsal runs everything on one CPU with as little work as possible.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from lab import small_studies
from lab.launching import load_script, torchrun
from lab.lesson_runs import (
    BASELINE,
    CUDA_GRAPH,
    FAST,
    LESSON_01,
    LESSON_02,
    LESSON_03,
    LESSON_04,
    LESSON_05,
    ON_GPU_TO_TARGET,
    RESULTS,
    TO_TARGET,
    describe_failure,
    epoch_seconds,
    line_profile,
    loader_throughputs,
    measured_in_turn,
    study_parts,
    time_to_target,
    train,
)
from lab.machine_facts import ask
from lab.trace_table import trace_table
from workshop.commandline import load_config
from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir

SHARDED_STEPS = {
    "one_step": "what two ranks store and send in one step of lesson 05, by --shard",
    "accumulation": "collectives and memory of gradient accumulation with sharded weights",
    "small_updates": "how many weights a step changes, stored in float32 and in bf16",
    "meta_device": "fresh weights after the meta device",
}
"""experiments of lesson 05 that are started as two ranks: what each of them shows, by the name of its script"""
UNET = ("--config", "../configs/unet3d.yaml")
OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
TINY_UNET = (*UNET, "--config", "../configs/unet3d_tiny.yaml")
TINIEST_UNET = (*TINY_UNET, "--crop_size", 8, "--unet_width", 4, "--limit_val", 16)
UNET_BATCH = 64
"""samples per step in unet3d.yaml, of one GPU"""
VIT = ("--config", "../configs/vit3d.yaml")
TINY_VIT = (*VIT, "--config", "../configs/vit3d_tiny.yaml", "--limit_train", 32, "--global_batch_size", 4)
SHARDED = {
    "DDP": (LESSON_04, ()),
    "FSDP2": (LESSON_05, ()),
    "FSDP2, --shard keep": (LESSON_05, ("--shard", "keep")),
    "FSDP2, --activation_checkpointing true": (LESSON_05, ("--activation_checkpointing", "true")),
}
"""lesson and flags of the runs of a large model that are compared"""
RESNET = ("--config", "../configs/cifar10.yaml", "--model", "resnet50")
RESNET_BATCH = 512
"""samples per GPU: a step of this model takes tens of milliseconds, so launching its kernels is a small part of it"""
FEW_IMAGES = ("--limit_train", 32, "--limit_val", 16, "--batch_size", 2)
SHORT_TRIALS = ("--benchmark_seconds", 0.01)
LOADERS = ("map", "shards", "memory", "device", "dali")
NEEDS = {"shards": "webdataset", "dali": "nvidia.dali"}
"""the package without which a loader cannot be measured"""

Figures = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class Session:
    """Where the figures go, and what the experiments can use."""

    file: Path
    mode: Literal["cpu", "gpu", "rehearsal"] = "gpu"
    cpus: int = 1
    gpus: int = 0
    boxes: Path = field(default_factory=default_data_dir)
    """data folder with the N-body boxes"""

    @property
    def rehearsal(self) -> bool:
        """Whether this is a rehearsal on one CPU."""
        return self.mode == "rehearsal"

    @property
    def num_workers(self) -> int:
        """Loader processes: enough for a GPU, where two CPUs are left to the training process; else one."""
        return max(1, self.cpus - 2) if self.mode == "gpu" else 1

    def study_parts(self, lesson: Path, script: str, *flags: object, **how: Any) -> Figures:  # noqa: ANN401
        """Run an experiment; its plot lies beside the file."""
        return study_parts(lesson, script, *flags, machine=self.file.with_suffix(""), **how)

    def cells(self) -> int:
        """Return the number of cells along each edge of the N-body boxes."""
        from workshop.datasets import nbody

        return nbody.box(self.boxes, "train").cells

    def unet_flags(self, *flags: object) -> tuple[object, ...]:
        """Return the flags of a U-Net that is trained on the boxes of this session: full, or tiny in a rehearsal."""
        chosen = (*TINIEST_UNET, "--loader", "device", "--precision", "bf16") if self.rehearsal else flags
        return (*chosen, "--data_dir", self.boxes)


Flags = tuple[object, ...]
"""of a command line; a function among them is called with the session and returns the word"""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Something to measure; None for the flags of a mode: it is not measured there."""

    name: str
    """its figures have this name in the file"""
    title: str
    measure: Callable[..., Figures]
    """(session, *flags): yields all figures so far, and so again after each part"""
    cpu: Flags | None = None
    gpu: Flags | None = None
    rehearsal: Flags | None = None
    data: tuple[str, ...] = ()
    """the data sets it needs"""
    seconds: int = 0
    """rough need of its first part on one GPU, before it has been measured there"""
    gpus: int = 1
    """that it needs, if it is measured on GPUs"""
    package: str = ""
    """a package that it needs, and others do not"""

    def flags(self, session: Session) -> Flags | None:
        """Return the flags of the session's mode."""
        flags: Flags | None = getattr(self, session.mode)
        return flags and tuple(word(session) if callable(word) else word for word in flags)

    def run(self, session: Session) -> Figures:
        """Measure; yield all figures so far, and so again after each part."""
        return self.measure(session, *(self.flags(session) or ()))

    def lacks(self, session: Session) -> str:
        """Say what this machine lacks for it; nothing, if it lacks nothing."""
        if self.package and not installed(self.package):
            return f"{self.package} is not installed"
        if session.rehearsal and self.rehearsal is None:
            return f"needs {self.gpus} GPUs, even in a rehearsal"
        return ""


def installed(package: str) -> bool:
    """Return whether a package, such as "nvidia.dali", can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # "nvidia.dali", where there is no "nvidia"
        return False


# --- how they are measured --------------------------------------------------------------------------------------------


def study(lesson: Path, script: str, **how: Any) -> Callable[..., Figures]:  # noqa: ANN401
    """Return the function that measures an experiment script of a lesson; ``how`` as in `study_parts`."""

    def measure(session: Session, *flags: object) -> Figures:
        yield from session.study_parts(lesson, script, *flags, **how)

    return measure


def volume_study(script: str, **how: Any) -> Callable[..., Figures]:  # noqa: ANN401
    """Return the function that measures an experiment script of lesson 04 on the boxes of the session."""

    def measure(session: Session, *flags: object) -> Figures:
        for figures in session.study_parts(LESSON_04, script, *flags, **how):
            yield figures | {"cells": session.cells()}

    return measure


def small_study(function: Callable[[], dict[str, Any]]) -> Callable[..., Figures]:
    """Return the function that yields the figures of a function without arguments."""

    def measure(_: Session) -> Figures:
        yield function()

    return measure


@contextmanager
def ranks_of_gpus() -> Iterator[int]:
    """Give how many GPUs there are for ranks; if it is one, hide it, so that CPUs are the devices of the ranks."""
    gpus = torch.cuda.device_count()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus == 1:
        print("one GPU cannot exchange anything: measured with ranks on CPUs", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield gpus if gpus > 1 else 0
    finally:
        if gpus == 1:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def scaling(session: Session, *flags: object) -> Figures:
    """Run scaling.py; outside a GPU run, with ranks on CPUs if there is only one GPU."""
    if session.mode != "cpu":
        yield from session.study_parts(LESSON_03, "scaling.py", *flags)
        return
    with ranks_of_gpus():
        yield from session.study_parts(LESSON_03, "scaling.py", *flags)


def allreduce(session: Session, *flags: object) -> Figures:
    """Run allreduce.py over a rank per GPU, else over two ranks of one thread (what torchrun sets)."""
    if session.mode != "cpu":
        yield from session.study_parts(LESSON_03, "allreduce.py", *flags, ranks=session.gpus or 2)
        return
    with ranks_of_gpus() as gpus:
        yield from session.study_parts(LESSON_03, "allreduce.py", *flags, ranks=gpus or 2)


def profiled(_: Session, *flags: object) -> Figures:
    """Run lesson 01 under the line profiler."""
    yield line_profile(*BASELINE, *flags)


def loaders(session: Session, *flags: object) -> Figures:
    """Measure IO, SYNTHETIC and FULL with each loader whose package is there; on CPUs first ``map`` without workers."""
    chosen = ("map",) if session.rehearsal else LOADERS
    missing = [loader for loader in chosen if loader in NEEDS and not installed(NEEDS[loader])]
    counts = [("map, 0 workers", "map", 0)] if session.mode == "cpu" else []
    counts += [(loader, loader, session.num_workers) for loader in chosen if loader not in missing]
    for figures in loader_throughputs(counts, *flags):
        yield figures | {"num_workers": session.num_workers, "not_installed": missing}


def unet3d_throughput(session: Session, *benchmark: object) -> Figures:
    """Measure the full U-Net with all options, also as a CUDA graph, and with none."""
    sets = {"options": OPTIONS, "options, CUDA graph": (*OPTIONS, *CUDA_GRAPH), "fp32": (*UNET, "--loader", "device")}
    if session.rehearsal:
        sets = {"options": OPTIONS}
    runs = {name: (session.unet_flags(*flags), 1) for name, flags in sets.items()}
    yield from _unet_throughputs(session, runs, benchmark)


def unet3d_scaling(session: Session, *benchmark: object) -> Figures:
    """Measure the full U-Net with all options on one GPU and on all, with the same batch for each."""
    counts = (1,) if session.rehearsal else (1, session.gpus)
    flags = {
        f"{ranks} rank(s)": ((*session.unet_flags(*OPTIONS), "--global_batch_size", UNET_BATCH * ranks), ranks)
        for ranks in counts
    }
    yield from _unet_throughputs(session, flags, benchmark)


def _unet_throughputs(session: Session, runs: dict[str, tuple[Flags, int]], benchmark: Flags) -> Figures:
    """Measure the throughput of each of ``runs`` (flags, ranks); yield it at once, then again in TFLOP/s.

    The peak of matrix products, which those are compared with, is that of one GPU in bf16, the fastest format here.
    """

    def throughput(flags: Sequence[object], ranks: int) -> dict[str, Any]:
        start = [sys.executable] if ranks == 1 else torchrun(ranks)
        return train(*flags, "--benchmark", "true", *benchmark, lesson=LESSON_04, launcher=start)

    parts = {name: partial(throughput, flags, ranks) for name, (flags, ranks) in runs.items()}
    facts: dict[str, Any] = {"batch_size": UNET_BATCH, "cells": session.cells()}
    for number, figures in enumerate(measured_in_turn(parts)):
        yield figures | facts
        if number == 0:
            (flags, _), *_ = runs.values()
            try:
                facts["flops_per_sample"] = ask("flops", *flags)
                facts["peak_tflops"] = ask("peak", "fp32" if session.rehearsal else "bf16")
            except UserError as error:  # samples/s are worth having all the same
                figures.setdefault("failed", {})["TFLOP/s"] = describe_failure(error)
        for name, row in figures["rows"].items():
            row["ranks"] = runs[name][1]
            if "flops_per_sample" in facts:
                rates = {kind: row[kind]["mean"] for kind in ("SYNTHETIC", "FULL")}
                row["tflops"] = {kind: rate * facts["flops_per_sample"] / 1e12 for kind, rate in rates.items()}
        yield figures | facts


def fully_sharded(session: Session, *benchmark: object) -> Figures:
    """Measure throughput, MFU and memory of a large vision transformer: DDP, and FSDP2 with and without recomputation.

    On one GPU nothing is sent, and each weight is whole: this compares what FSDP2 itself costs.
    """
    model = TINY_VIT if session.rehearsal else VIT
    flags = (*model, "--data_dir", session.boxes, "--benchmark", "true", "--mfu", "true", *benchmark)
    parts = {name: partial(train, *flags, *own, lesson=lesson) for name, (lesson, own) in SHARDED.items()}
    yield from measured_in_turn(parts, about={"cells": session.cells(), "flags": list(map(str, model))})


def mnist_epochs(session: Session, *flags: object) -> Figures:
    """Train lesson 01 and the fast configuration of lesson 04 on MNIST."""
    workers = ("--num_workers", session.num_workers)
    runs = {
        "lesson 01": (LESSON_01, BASELINE),
        "fast": (LESSON_04, FAST),
        "fast, CUDA graph": (LESSON_04, (*FAST, *CUDA_GRAPH)),
        f"lesson 01, {session.num_workers} worker(s)": (LESSON_01, (*BASELINE, *workers)),
    }
    if session.rehearsal:
        runs = {"lesson 01": runs["lesson 01"]}
    yield from measured_in_turn(
        {name: partial(epoch_seconds, lesson, *own, *flags) for name, (lesson, own) in runs.items()}
    )


def trace(session: Session, *flags: object) -> Figures:
    """Trace the full U-Net without compilation, so that the kernels have their own names."""
    full = (*OPTIONS, "--compile", "off", "--limit_train", 1280, "--limit_val", 64)
    with tempfile.TemporaryDirectory() as folder:
        words = (*session.unet_flags(*full), *flags, "--epochs", 1, "--trace", "true")
        train(*words, lesson=LESSON_04, keep={"*.pt.trace.json.gz": Path(folder)})
        yield trace_table(Path(folder) / "rank0.pt.trace.json.gz") | {"cells": session.cells()}


def line_profiles(session: Session, *flags: object) -> Figures:
    """Run lesson 01 under the line profiler without workers, and with enough of them for a GPU."""
    counts = {f"{count} worker(s)": count for count in (0, session.num_workers)}
    parts = {
        name: partial(line_profile, *BASELINE, "--num_workers", count, *flags)
        for name, count in counts.items()
        if count == 0 or not session.rehearsal
    }
    yield from measured_in_turn(parts)


def fast(session: Session, *flags: object) -> Figures:
    """Measure the training seconds to 98 % accuracy, three rounds of all runs, one run after the other."""
    if session.rehearsal:
        yield from time_to_target(1, *flags, runs={"baseline": TO_TARGET["baseline"]}, target=0.0)
    else:
        yield from time_to_target(3, *flags, runs=ON_GPU_TO_TARGET if session.mode == "gpu" else TO_TARGET)


def convergence() -> dict[str, Any]:
    """Train lesson 03 with batches of 64 and 512 and three seeds; the example logs are those of the first seed."""
    all_results = []
    for seed in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "experiments/convergence.py", "--seed", str(seed), "--out", folder]
            subprocess.run(command, cwd=LESSON_03, check=True)
            all_results.append(json.loads((Path(folder) / "convergence.json").read_text()))
            if seed == 1:
                for events in Path(folder).glob("*/events.out.tfevents.*"):
                    example = RESULTS / "example_logs" / events.parent.name / "events.out.tfevents.0.example"
                    example.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(events, example)  # its own name contains that of this machine
    return {
        "studies": [
            {key: results[key] for key in ("target_val_loss", "conclusions", "curves")} for results in all_results
        ]
    }


def trivial_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error, (), of the identity baseline, which every network should beat.

    It predicts that the gas is where the dark matter is, moves as it does, and has the same temperature everywhere.

    Args:
        inputs: (N, 4, X, Y, Z).
        targets: (N, 5, X, Y, Z).
    """
    return F.l1_loss(torch.cat([inputs, torch.zeros_like(targets[:, 4:])], dim=1), targets)


def unet3d() -> dict[str, Any]:
    """Train the tiny U-Net in each number format that a CPU has, and compare it with the identity baseline."""
    files = [word.replace("..", str(REPOSITORY)) for word in TINY_UNET]
    script = load_script(LESSON_04)
    batches = list(script.make_loader(load_config(script.Config, files), "val", torch.device("cpu"), 0, 1))
    trivial = trivial_loss(*(torch.cat(parts) for parts in zip(*batches, strict=True))).item()
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        epochs = train(*TINY_UNET, "--precision", precision, lesson=LESSON_04)["epochs"]
        seconds = sum(epoch["seconds"] for epoch in epochs)
        rows.append({"precision": precision, "val_loss": epochs[-1]["val_loss"], "seconds": seconds})
    return {"trivial_loss": trivial, "rows": rows}


def resnet_batch(session: Session) -> int:
    """Return the samples of a step over all GPUs."""
    return RESNET_BATCH * session.gpus


def boxes(session: Session) -> Path:
    """Return the folder with the N-body boxes."""
    return session.boxes


EXPERIMENTS = (
    Experiment(
        name="unet3d_throughput",
        title="IO, SYNTHETIC and FULL of the full U-Net: with all options, also as a CUDA graph, and with none",
        measure=unet3d_throughput,
        gpu=("--benchmark_seconds", 1),
        rehearsal=SHORT_TRIALS,
        data=("nbody",),
        seconds=90,
    ),
    Experiment(
        name="fully_sharded",
        title="throughput, MFU and memory of a vision transformer of 1.6 billion weights: DDP, and FSDP2 on one GPU",
        measure=fully_sharded,
        gpu=("--benchmark_seconds", 1),
        rehearsal=SHORT_TRIALS,
        data=("nbody",),
        seconds=120,
    ),
    Experiment(
        name="mnist_epochs",
        title="seconds of the first and of later epochs on MNIST: lesson 01, and the fast configuration of lesson 04",
        measure=mnist_epochs,
        gpu=("--epochs", 3),
        rehearsal=(*FEW_IMAGES, "--epochs", 2),
        data=("mnist",),
        seconds=35,
    ),
    Experiment(
        name="precision_ladder",
        title="cost and gain of each option of lesson 04; on a GPU of the full U-Net, 64^3 cells and batches of 64",
        measure=volume_study("ladder.py", name="precision_ladder"),
        cpu=(),
        gpu=("--loader", "device", "--data_dir", boxes, "--steps", 30, "--trial_seconds", 0.5),
        rehearsal=("--loader", "device", "--data_dir", boxes, "--quick", "true", "--trials", 2),
        data=("nbody",),
        seconds=60,
    ),
    Experiment(
        name="unet3d_scaling",
        title="IO, SYNTHETIC and FULL of the full U-Net on one GPU and on all, with the same batch for each",
        measure=unet3d_scaling,
        gpu=("--benchmark_seconds", 1),
        rehearsal=SHORT_TRIALS,
        data=("nbody",),
        seconds=75,
        gpus=2,
    ),
    Experiment(
        name="loaders",
        title="IO, SYNTHETIC and FULL of CIFAR-10 with each loader",
        measure=loaders,
        cpu=("--config", "../configs/cifar10.yaml", "--benchmark_seconds", 3),
        gpu=("--config", "../configs/cifar10.yaml", "--benchmark_seconds", 1),
        rehearsal=("--config", "../configs/cifar10.yaml", *FEW_IMAGES, *SHORT_TRIALS),
        data=("cifar10",),
        seconds=20,
    ),
    Experiment(
        name="mnist_loaders",
        title="IO, SYNTHETIC and FULL of MNIST with each loader",
        measure=loaders,
        gpu=("--config", "../configs/mnist.yaml", "--benchmark_seconds", 1),
        rehearsal=("--config", "../configs/mnist.yaml", *FEW_IMAGES, *SHORT_TRIALS),
        data=("mnist",),
        seconds=20,
    ),
    Experiment(
        name="trace",
        title="the kernels of a step of the full U-Net",
        measure=trace,
        gpu=(),
        rehearsal=("--limit_train", 160),
        data=("nbody",),
        seconds=40,
    ),
    Experiment(
        name="line_profiles",
        title="lesson 01 under the line profiler, without workers and with enough of them for a GPU",
        measure=line_profiles,
        gpu=("--limit_train", 20000, "--limit_val", 1000),
        rehearsal=FEW_IMAGES,
        data=("mnist",),
        seconds=25,
        package="line_profiler",
    ),
    Experiment(
        name="baseline",
        title="lesson 01 with its default settings, one epoch under the line profiler",
        measure=profiled,
        cpu=(),
        gpu=(),
        rehearsal=FEW_IMAGES,
        data=("mnist",),
        seconds=30,
        package="line_profiler",
    ),
    Experiment(
        name="compare",
        title="one device, DataParallel and DDP on the same work",
        measure=study(LESSON_02, "compare.py"),
        cpu=("--rounds", 3, "--seconds", 2),
        gpu=(*RESNET, "--loader", "device", "--global_batch_size", resnet_batch, "--rounds", 2, "--seconds", 1),
        rehearsal=("--seconds", 0.01, "--limit_train", 32, "--global_batch_size", 1, "--ranks", 1),
        data=("mnist", "cifar10"),
        seconds=90,
        gpus=2,
    ),
    Experiment(
        name="bucket_timelines",
        title="DDP's all-reduces during backward, in one bucket and in many",
        measure=study(LESSON_03, "bucket_timelines.py"),
        cpu=(),
        gpu=("--rounds", 2, "--batch_size", RESNET_BATCH, "--model", "resnet50"),
        rehearsal=("--rounds", 1, "--steps", 12, "--batch_size", 1, "--model", "cifar_cnn"),
        data=("cifar10",),
        seconds=90,
        gpus=2,
    ),
    Experiment(
        name="nccl_backends",
        title="a traced step with each of PyTorch's two NCCL backends: do all-reduces overlap with backward?",
        measure=study(LESSON_03, "nccl_backends.py"),
        gpu=(),
        data=("cifar10",),
        seconds=60,
        gpus=2,
    ),
    Experiment(
        name="allreduce",
        title="an all-reduce by message size, over all GPUs or two ranks on CPUs",
        measure=allreduce,
        cpu=("--seconds", 0.5),
        gpu=("--seconds", 0.2, "--max_mib", 512),
        rehearsal=("--seconds", 0.001, "--max_mib", 0.25),
        seconds=30,
        gpus=2,
    ),
    Experiment(
        name="fast",
        title="training seconds to 98 % accuracy: lesson 01, also on fewer samples, and mnist_fast.yaml",
        measure=fast,
        cpu=(),
        gpu=(),
        rehearsal=FEW_IMAGES,
        data=("mnist",),
        seconds=80,
    ),
    Experiment(
        name="bandwidth",
        title="GB/s of disk, memory, to the GPU and within its memory",
        measure=study(LESSON_01, "bandwidth.py"),
        cpu=(),
        gpu=("--quick", "true"),
        rehearsal=("--quick", "true"),
        seconds=30,
    ),
    Experiment(
        name="underflow",
        title="gradients that 16 bits cannot hold; on a GPU of the full U-Net",
        measure=volume_study("underflow.py"),
        cpu=(),
        gpu=("--loader", "device", "--data_dir", boxes, "--steps", 50),
        rehearsal=("--loader", "device", "--data_dir", boxes, "--quick", "true"),
        data=("nbody",),
        seconds=60,
    ),
    Experiment(
        name="tensor_cores",
        title="matrix products of sizes that are multiples of 8, and others",
        measure=study(LESSON_04, "tensor_cores.py"),
        gpu=("--around", 8),
        rehearsal=("--quick", "true"),
        seconds=40,
    ),
    Experiment(
        name="cpu_or_gpu",
        title="all computations of cpu_or_gpu.py, as the lesson runs them",
        measure=study(LESSON_01, "cpu_or_gpu.py"),
        cpu=("--all", "--quick", "true"),
        gpu=("--all", "--quick", "true"),
        rehearsal=("--experiment", "elementwise", "--quick", "true"),
        seconds=60,
    ),
    Experiment(
        name="scaling",
        title="weak and strong scaling over the ranks of this machine",
        measure=scaling,
        cpu=("--rounds", 3, "--seconds", 2),
        gpu=(
            *(*RESNET, "--loader", "device", "--batch_size", RESNET_BATCH, "--global_batch_size", resnet_batch),
            *("--rounds", 2, "--seconds", 1),
        ),
        rehearsal=("--quick", "true", "--max_ranks", 1, "--limit_train", 32, "--seconds", 0.01, "--batch_size", 1),
        data=("mnist", "cifar10"),
        seconds=180,
        gpus=2,
    ),
    Experiment(
        name="success_rate",
        title="how many of 20 seeds mnist_fast.yaml takes to 98 %, and in what time, compared with lesson 01",
        measure=study(LESSON_04, "success_rate.py"),
        cpu=("--seeds_of_others", 3),
        data=("mnist",),
    ),
    Experiment(
        name="loading_timelines",
        title="lesson 01's steps on a time line, with 0, 1 and 4 processes that load data",
        measure=study(LESSON_01, "loading_timelines.py"),
        cpu=(),
        data=("cifar10",),
    ),
    Experiment(
        name="emulated_gpu",
        title="lesson 01 with an emulated GPU: time of each line, workers, overlap, time lines",
        measure=study(LESSON_01, "emulated_study.py"),
        cpu=(),
        data=("mnist",),
        package="line_profiler",
    ),
    Experiment(
        name="emulated_scaling",
        title="efficiency of 1 to 8 ranks with emulated GPUs and real all-reduces",
        measure=study(LESSON_03, "emulated_scaling.py"),
        cpu=(),
    ),
    Experiment(
        name="sequential_reads",
        title="shards compared with single files, from disk",
        measure=study(LESSON_01, "sequential_reads.py"),
        cpu=(),
        data=("mnist",),
    ),
    Experiment(
        name="convergence",
        title="lesson 03's batch of 64 compared with 512, with three seeds",
        measure=small_study(convergence),
        cpu=(),
        data=("cifar10",),
    ),
    Experiment(
        name="ddp_step",
        title="a training step of DDP on a time line of two ranks",
        measure=study(LESSON_03, "ddp_step.py"),
        cpu=(),
        data=("cifar10",),
    ),
    Experiment(
        name="line_fit",
        title="a line fitted to noisy samples by gradient descent",
        measure=study(LESSON_01, "line_fit.py"),
        cpu=(),
    ),
    Experiment(
        name="unet3d",
        title="the tiny U-Net in each number format that a CPU has, compared with the identity baseline",
        measure=small_study(unet3d),
        cpu=(),
        data=("nbody",),
    ),
    Experiment(
        name="limited_memory",
        title="a model that DDP cannot train in a limited memory, and FSDP2 can",
        measure=study(LESSON_05, "limited_memory.py"),
        cpu=(),
        data=("mnist",),
    ),
    Experiment(
        name="same_losses",
        title="the losses of DDP and of FSDP2 on 1, 2 and 4 ranks",
        measure=study(LESSON_05, "same_losses.py"),
        cpu=(),
        data=("mnist",),
    ),
    Experiment(
        name="save_and_reshard",
        title="both forms of checkpoint: resumed on other numbers of ranks, what they cost, and damaged",
        measure=study(LESSON_05, "save_and_reshard.py"),
        cpu=(),
        data=("mnist",),
    ),
    *(
        Experiment(name=name, title=title, measure=study(LESSON_05, f"{name}.py", ranks=2), cpu=())
        for name, title in SHARDED_STEPS.items()
    ),
    Experiment(
        name="recompute",
        title="what activation checkpointing saves and costs",
        measure=study(LESSON_05, "recompute.py"),
        cpu=(),
    ),
    Experiment(
        name="step_timeline",
        title="a training step of lesson 05 on a time line of two ranks",
        measure=study(LESSON_05, "step_timeline.py"),
        cpu=(),
        data=("mnist",),
    ),
    *(
        Experiment(name=one.__name__, title=one.__doc__ or "", measure=small_study(one), cpu=(), data=data)
        for one, data in small_studies.STUDIES.items()
    ),
)
"""those of GPUs in the order of their importance there"""
