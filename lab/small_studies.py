"""Measurements that the side pages of the lessons show: small variations of a lesson's own command."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.first_changes import first_changes, slow_files
from lab.launching import run_and_read, torchrun
from lab.lesson_runs import LESSON_01, LESSON_02, LESSON_03
from workshop.hardware import available_cpus

CIFAR = ("--config", "../configs/cifar10.yaml")
BENCHMARK = ("--benchmark", "true", "--benchmark_seconds", 2)


def train(
    *flags: object, lesson: Path = LESSON_01, ranks: int | None = None, threads: int | None = None
) -> dict[str, Any]:
    """Run train.py of a lesson, as one process or as ranks of one thread each; return its results."""
    start = torchrun(ranks) if ranks else [sys.executable]
    return run_and_read([*start, "train.py", *flags], lesson, flag="--run_dir", threads=threads, show=True)


def throughputs(results: dict[str, Any]) -> dict[str, Any]:
    """Keep mean and standard deviation of each kind of throughput."""
    return {
        kind: {"mean": found["mean"], "std": found["std"]} for kind, found in results.items() if isinstance(found, dict)
    }


def worker_counts() -> dict[str, Any]:
    """Lesson 01 with more and more processes that load data, up to far more than there are CPUs."""
    rows = [{"num_workers": n} | throughputs(train(*BENCHMARK, "--num_workers", n)) for n in (0, 1, 2, 4, 8)]
    return {"cpus": available_cpus(), "rows": rows}


def models() -> dict[str, Any]:
    """CIFAR-10 with models from small to large: is loading or training slower?"""
    flags = (*CIFAR, *BENCHMARK, "--batch_size", 32, "--limit_train", 3200)
    names = ("cifar_cnn", "resnet18", "resnet152")
    return {"rows": [{"model": name} | throughputs(train(*flags, "--model", name)) for name in names]}


def cifar_loading() -> dict[str, Any]:
    """CIFAR-10 and a small CNN: batch size, workers and how many batches they prepare ahead."""
    rows = []
    for batch_size, num_workers, prefetch in (
        (128, 0, 2),
        (128, 1, 2),
        (128, 2, 2),
        (128, 2, 8),
        (1024, 0, 2),
        (1024, 2, 2),
    ):
        found = train(
            *CIFAR, *BENCHMARK, "--batch_size", batch_size, "--num_workers", num_workers, "--prefetch_factor", prefetch
        )
        rows.append({"batch": batch_size, "workers": num_workers, "prefetch": prefetch} | throughputs(found))
    return {"rows": rows}


def ddp_options() -> dict[str, Any]:
    """Two ranks, a ResNet-18 with its batch norms: all-reduces and speed with each option of DDP."""
    options = {
        "default settings": (),
        "`--bucket_cap_mb 5`": ("--bucket_cap_mb", 5),
        "`--bucket_cap_mb 100`": ("--bucket_cap_mb", 100),
        "`--forward_sync_buffers false`": ("--forward_sync_buffers", "false"),
        "`--gradient_as_bucket_view true`": ("--gradient_as_bucket_view", "true"),
    }
    flags = (*CIFAR, "--loader", "memory", "--model", "resnet18", "--batch_size", 32)
    rows = []
    for name, option in options.items():
        few = (*flags, *option, "--limit_train", 256, "--limit_val", 64)
        counted = train(*few, lesson=LESSON_03, ranks=2, threads=1)
        measured = throughputs(train(*flags, *option, *BENCHMARK, lesson=LESSON_03, ranks=2, threads=1))
        counts = {key: counted[key] for key in ("all_reduces_per_step", "all_reduce_bytes_per_step")}
        rows.append({"option": name} | counts | measured)
    return {"ranks": 2, "batch_size": 32, "rows": rows}


def batches() -> dict[str, Any]:
    """Lesson 03's study of large batches with ten seeds, and a batch of 2048, which takes long, with three of them."""
    curves: dict[str, list[dict[str, Any]]] = {}
    kept = ("name", "global_batch_size", "peak_lr", "epochs", "steps", "val_loss", "epoch_at_target")
    for seed in range(1, 11):
        overlays = ["b64", "b512_naive", "b512_sqrt", "b256_sqrt_long", "b512_sqrt_long", "b2048_sqrt_long"]
        overlays = overlays if seed <= 3 else overlays[:-1]
        flags = [word for name in overlays for word in ("--overlay", f"../configs/cifar10_{name}.yaml")]
        command = [sys.executable, "experiments/convergence.py", *flags, "--seed", seed]
        for curve in run_and_read(command, LESSON_03, show=True)["curves"]:
            curves.setdefault(curve["name"], []).append({key: curve[key] for key in kept})
    return {"curves": curves}


def exercises() -> dict[str, Any]:
    """Losses and accuracies that the exercises of lessons 01 to 03 end with, whatever the speed of the machine."""
    few = ("--limit_train", 6400)
    variants = {
        "seed 1": (LESSON_01, 1, few),
        "seed 2": (LESSON_01, 1, (*few, "--seed", 2)),
        "batch 128": (LESSON_02, 1, (*few, "--batch_size", 128)),
        "batch 256": (LESSON_02, 1, (*few, "--batch_size", 256)),
        "sgd": (LESSON_02, 1, (*few, "--optimizer", "sgd", "--lr", 0.01)),
        "adamw": (LESSON_02, 1, (*few, "--optimizer", "adamw")),
        "adadelta": (LESSON_02, 1, (*few, "--optimizer", "adadelta", "--lr", 1.0)),
        "1 rank": (LESSON_03, 1, ("--limit_train", 3200, "--global_batch_size", 64)),
        "2 ranks": (LESSON_03, 2, ("--limit_train", 3200, "--global_batch_size", 64)),
    }
    found = {}
    for name, (lesson, ranks, flags) in variants.items():
        epoch = train(*flags, lesson=lesson, ranks=ranks if ranks > 1 else None)["epochs"][-1]
        found[name] = {key: epoch[key] for key in ("train_loss", "val_loss", "val_accuracy")}
    return {"runs": found}


def higher_rate() -> dict[str, Any]:
    """Batch 64 of lesson 03's study with its learning rate, with 2.8 and with 8 times as much, and no larger batch."""
    names = ("cifar10", "cifar10_convergence", "cifar10_b64")
    flags = [word for name in names for word in ("--config", f"../configs/{name}.yaml")]
    rows = []
    for factor in (1, 2.8, 8):
        epochs = train(*flags, "--lr", round(0.004 * factor, 4), lesson=LESSON_03)["epochs"]
        rows.append({"lr": 0.004 * factor, "val_loss": [epoch["val_loss"] for epoch in epochs]})
    return {"rows": rows}


STUDIES: dict[Callable[[], dict[str, Any]], tuple[str, ...]] = {
    first_changes: ("mnist", "cifar10"),
    slow_files: ("mnist",),
    worker_counts: ("mnist",),
    models: ("cifar10",),
    cifar_loading: ("cifar10",),
    batches: ("cifar10",),
    higher_rate: ("cifar10",),
    exercises: ("mnist",),
    ddp_options: ("cifar10",),
}
"""and the data sets that they need"""
