"""How the experiments of lab/experiments.py are measured: functions that yield all figures so far, after each part."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lab.launching import load_script, torchrun
from lab.lesson_runs import (
    BASELINE,
    CUDA_GRAPH,
    FAST,
    LESSON_01,
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
    time_to_target,
    train,
)
from lab.machine_facts import ask
from lab.session import NEEDS, TINY_UNET, UNET, Figures, Flags, Session, installed
from lab.trace_table import trace_table
from workshop.commandline import load_config
from workshop.errors import UserError
from workshop.paths import REPOSITORY

OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
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
RESNET_BATCH = 512
"""samples per GPU: a step of this model takes tens of milliseconds, so launching its kernels is a small part of it"""
LOADERS = ("map", "shards", "memory", "device", "dali")


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
