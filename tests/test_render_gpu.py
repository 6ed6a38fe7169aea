"""If a GPU was measured, the pages show it beside the CPU; else they are as they were. The results are made up."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest

from lab import render, render_compute, render_scaling

GPU = {"device": "cuda", "device_name": "Made-up GPU", "gpus": 1, "cpu": "a CPU", "cpus_available": 16}
RENDERINGS = {
    "baseline": [render.line_profile, render.baseline_epoch],
    "loaders": [render.loaders],
    "fast": [render.fast],
    "bandwidth": [render.bandwidth],
    "cpu_or_gpu": [render.cpu_or_gpu],
    "precision_ladder": [render_compute.short_ladder, render_compute.precision_ladder],
    "underflow": [render_compute.underflow],
    "compare": [render_scaling.compare],
    "scaling": [render_scaling.scaling],
    "allreduce": [render_scaling.allreduce],
}
PAIRS = [(experiment, one) for experiment, functions in RENDERINGS.items() for one in functions]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in render.RESULTS.glob("*cpu.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    return tmp_path


def write(folder: Path, gpus: int, **changes: object) -> None:
    """A machine whose results are all the CPU's, but of a GPU, and with these ``changes``."""
    measured = {name: copy.deepcopy(render.load(name)) for name in RENDERINGS}
    for figures in measured.values():
        figures |= {"hardware": GPU | {"gpus": gpus, "device_name": f"Made-up GPU x{gpus}"}} | changes
    kinds = {kind: {"mean": 100.0, "std": 1.0} for kind in ("IO", "SYNTHETIC", "FULL")}
    about = {key: measured["loaders"][key] for key in ("hardware", "versions", "date", "command")}
    measured["unet3d_throughput"] = about | {"rows": {"options": kinds}}
    kernel = {"name": "gemm", "calls_per_step": 3.0, "ms_per_step": 1.5, "share": 0.75}
    measured["trace"] = about | {"step_ms": 3.0, "busy_ms_per_step": 2.0, "rows": [kernel]}
    measured["tensor_cores"] = about | {"conclusions": {"bf16": "bf16: multiples of 8 are faster"}}
    (folder / f"made_up_{gpus}gpu.json").write_text(json.dumps(measured))


@pytest.mark.parametrize(("experiment", "one"), PAIRS, ids=lambda value: getattr(value, "__name__", value))
def test_both_machines_are_shown(results: Path, experiment: str, one: render.Rendering) -> None:
    alone = one()
    assert "Made-up" not in alone
    write(results, 1, unfinished=True)
    assert one() == alone
    write(results, 1)
    write(results, 8)
    both = one()
    shown = set(re.findall(r"Made-up GPU x\d", both))
    assert shown == {"Made-up GPU x8" if experiment in render.BY_MANY else "Made-up GPU x1"}
    # Older results do not name the instructions of the CPU, and a table of several machines adds them.
    machine, both_without = (
        re.sub(r" \(AVX\d+\)", "", text) for text in (render.machine(render.load(experiment)), both)
    )
    assert machine in both_without
    assert all(line.count("|") <= 9 for line in both.splitlines() if one is render.loaders and line.startswith("|"))


def test_what_a_cpu_cannot_show_is_of_a_gpu_only(results: Path) -> None:
    assert render_compute.tensor_cores() == render.not_measured("gpu")
    write(results, 1)
    shown = render_compute.tensor_cores()
    assert "multiples of 8 are faster" in shown and "made_up_1gpu_tensor_cores.png" in shown


def test_ranks_on_cpus_of_a_gpu_machine_are_no_gpus(results: Path) -> None:
    write(results, 1, hardware={"device": "cpu", "cpu": "a CPU", "cpus_available": 2})
    assert {render.gpu_machine(experiment) for experiment in RENDERINGS} == {None}


def test_older_results_are_read_with_the_present_names(results: Path) -> None:
    """The keys and the path of measure.py have changed since; the results files have not."""
    about = {key: render.load("loaders")[key] for key in ("hardware", "versions", "date")}
    command = "python results/measure.py ladder"
    loader = KINDS | {"verdict": "Data-bound."}
    older = {"ladder": about | {"command": command, "rungs": {"map": loader, "memory": loader}}}
    (results / "made_up_1gpu.json").write_text(json.dumps(older))
    figures = render.load("loaders", "made_up_1gpu")
    assert figures["loaders"]["map"] == KINDS | {"diagnosis": "Data-bound."}
    assert render.source(figures).endswith("with `python lab/measure.py loaders`.*")


def test_training_seconds_name_those_of_the_first_step(results: Path) -> None:
    runs = {
        name: [run | {"first_step_seconds": 0.5} for run in found]
        for name, found in render.load("fast")["runs"].items()
    }
    write(results, 1, runs=runs)
    assert "the first step, in which libraries and kernels are loaded, took 0.5, 0.5" in render.fast()


def test_the_full_unet_and_its_kernels_are_shown(results: Path) -> None:
    """In the form of older results, which contain neither TFLOP/s nor the cells of the boxes."""
    assert render_compute.full_unet() == "*Not measured yet: `python lab/measure.py gpu`.*"
    write(results, 1)
    shown = render_compute.full_unet()
    assert "| options | 100 ± 1 | 100 ± 1 | 100 ± 1 | 100% |" in shown
    assert "| `gemm` | 3.0 | 1.50 | 75.0% |" in shown
    assert "TFLOP/s" not in shown
    add(results, 1, unet3d_throughput={"rows": {}, "unfinished": True}, trace={"rows": [], "unfinished": True})
    assert "Not measured" in render_compute.full_unet()


def add(folder: Path, gpus: int, **experiments: dict) -> None:
    """Add the results of experiments to the file that `write` wrote."""
    file = folder / f"made_up_{gpus}gpu.json"
    found = json.loads(file.read_text())
    about = {key: found["loaders"][key] for key in ("hardware", "versions", "date", "command")}
    file.write_text(json.dumps(found | {name: about | figures for name, figures in experiments.items()}))


KINDS = {kind: {"mean": 2000.0, "std": 1.0} for kind in ("IO", "SYNTHETIC", "FULL")}


def test_tflops_and_their_share_of_the_peak_are_shown(results: Path) -> None:
    row = KINDS | {"tflops": {"SYNTHETIC": 170.0, "FULL": 160.0}, "ranks": 1}
    facts = {"flops_per_sample": 80.5e9, "peak_tflops": 640.0, "cells": 128, "batch_size": 64}
    for gpus in (1, 8):
        write(results, gpus)
    add(results, 1, unet3d_throughput=facts | {"rows": {"options": row}})
    of_eight = {"8 rank(s)": row | {"ranks": 8, "tflops": {"SYNTHETIC": 1300.0, "FULL": 1280.0}}}
    add(results, 8, unet3d_scaling=facts | {"rows": of_eight})
    shown = render_compute.full_unet()
    assert "| options | 2,000 ± 1 | 2,000 ± 1 | 2,000 ± 1 | 100% | 160 | 25% |" in shown
    assert "80.5 GFLOP per sample" in shown and "640 TFLOP/s" in shown and "128 cells" in shown
    assert "| 8 rank(s) | 2,000 ± 1 | 2,000 ± 1 | 2,000 ± 1 | 100% | 1,280 | 25% |" in shown


def test_epochs_and_loaders_of_mnist_are_shown(results: Path) -> None:
    assert "Not measured" in render.mnist_on_gpu() and "Not measured" in render.line_profiles()
    write(results, 1)
    assert "of them" not in render.loaders()  # older results do not say how many workers there were
    epochs = [{"seconds": s, "samples_per_second": 60000 / s, "val_accuracy": 0.99} for s in (4.0, 2.0, 2.5)]
    line = {"text": "    loss.backward()", "percent": 44.25}
    cifar = json.loads((results / "made_up_1gpu.json").read_text())["loaders"]
    add(
        results,
        1,
        mnist_epochs={"rows": {"lesson 01": {"epochs": epochs, "first_step_seconds": 0.5, "flags": []}}},
        mnist_loaders={"loaders": {"map": KINDS}, "num_workers": 14, "not_installed": ["dali"]},
        line_profiles={"rows": {"0 worker(s)": {"lines": [line]}, "14 worker(s)": {"lines": [line]}}},
        loaders={"loaders": cifar["loaders"], "num_workers": 14},
    )
    shown = render.mnist_on_gpu()
    assert "| lesson 01 | 4.00 | 2.00, 2.50 | 24,000 | 99.00% |" in shown
    assert "| `map` | 2,000 ± 1 | 2,000 ± 1 | 2,000 ± 1 |" in shown and "have 14 of them" in shown
    assert "have 14 of them" in render.loaders()
    assert "| 14 worker(s) | `loss.backward()` | 44.2 |" in render.line_profiles()


def test_a_loader_that_failed_is_not_shown(results: Path) -> None:
    """Its figures are missing, and those of the others are there."""
    write(results, 1)
    loaders = json.loads((results / "made_up_1gpu.json").read_text())["loaders"]["loaders"]
    del loaders["dali"]
    add(results, 1, loaders={"loaders": loaders, "num_workers": 14, "failed": {"dali": "RuntimeError: no engine"}})
    (line,) = (line for line in render.loaders().splitlines() if line.startswith("| `dali`"))
    assert line.endswith("|  |  |  |")
