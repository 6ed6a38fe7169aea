"""With a record of a GPU the pages show it beside the CPU; without one they are as they were. The record is made up."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest

import render
import render_compute
import render_scaling

GPU = {"device": "cuda", "device_name": "Made-up GPU", "gpus": 1, "cpu": "a CPU", "cpus_available": 16}
RENDERINGS = {
    "baseline": [render.line_profile, render.baseline_epoch],
    "ladder": [render.ladder],
    "fast": [render.fast],
    "bandwidth": [render.bandwidth],
    "cpu_or_gpu": [render.cpu_or_gpu],
    "precision_ladder": [render_compute.short_ladder, render_compute.precision_ladder],
    "underflow": [render_compute.underflow],
    "tensor_cores": [render_compute.tensor_cores],
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
    """A machine whose every record is the CPU's, but of a GPU, and with these ``changes``."""
    records = {name: copy.deepcopy(render.load(name)) for name in RENDERINGS}
    for record in records.values():
        record |= {"hardware": GPU | {"gpus": gpus, "device_name": f"Made-up GPU x{gpus}"}} | changes
    kinds = {kind: {"mean": 100.0, "std": 1.0} for kind in ("IO", "SYNTHETIC", "FULL")}
    about = {key: records["ladder"][key] for key in ("hardware", "versions", "date", "command")}
    records["unet3d_throughput"] = about | {"rows": {"options": kinds}}
    kernel = {"name": "gemm", "calls_per_step": 3.0, "ms_per_step": 1.5, "share": 0.75}
    records["trace"] = about | {"step_ms": 3.0, "busy_ms_per_step": 2.0, "rows": [kernel]}
    (folder / f"made_up_{gpus}gpu.json").write_text(json.dumps(records))


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
    assert render.machine(render.load(experiment)) in both
    assert all(line.count("|") <= 9 for line in both.splitlines() if one is render.ladder and line.startswith("|"))


def test_ranks_on_cpus_of_a_gpu_machine_are_no_gpus(results: Path) -> None:
    write(results, 1, hardware={"device": "cpu", "cpu": "a CPU", "cpus_available": 2})
    assert {render.gpu_machine(experiment) for experiment in RENDERINGS} == {None}


def test_training_seconds_name_those_of_the_first_step(results: Path) -> None:
    runs = {
        name: [run | {"first_step_seconds": 0.5} for run in found]
        for name, found in render.load("fast")["runs"].items()
    }
    write(results, 1, runs=runs)
    assert "the first step, in which libraries and kernels are loaded, took 0.5, 0.5" in render.fast()


def test_the_full_unet_and_its_kernels_are_shown(results: Path) -> None:
    """In the form of older records, which hold neither TFLOP/s nor the cells of the boxes."""
    assert render_compute.full_unet() == "*Not measured yet: `python results/measure.py gpu`.*"
    write(results, 1)
    shown = render_compute.full_unet()
    assert "| options | 100 ± 1 | 100 ± 1 | 100 ± 1 | 100% |" in shown
    assert "| `gemm` | 3.0 | 1.50 | 75.0% |" in shown
    assert "TFLOP/s" not in shown
    add(results, 1, unet3d_throughput={"rows": {}, "unfinished": True}, trace={"rows": [], "unfinished": True})
    assert "Not measured" in render_compute.full_unet()


def add(folder: Path, gpus: int, **records: dict) -> None:
    """Add records to the file that `write` wrote."""
    file = folder / f"made_up_{gpus}gpu.json"
    found = json.loads(file.read_text())
    about = {key: found["ladder"][key] for key in ("hardware", "versions", "date", "command")}
    file.write_text(json.dumps(found | {name: about | record for name, record in records.items()}))


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
    assert "of them" not in render.ladder()  # older records do not say how many workers there were
    epochs = [{"seconds": s, "samples_per_second": 60000 / s, "val_accuracy": 0.99} for s in (4.0, 2.0, 2.5)]
    line = {"text": "    loss.backward()", "percent": 44.25}
    cifar = json.loads((results / "made_up_1gpu.json").read_text())["ladder"]
    add(
        results,
        1,
        mnist_epochs={"rows": {"lesson 01": {"epochs": epochs, "first_step_seconds": 0.5, "flags": []}}},
        mnist_ladder={"rungs": {"map": KINDS}, "num_workers": 14, "not_installed": ["dali"]},
        line_profiles={"rows": {"0 worker(s)": {"lines": [line]}, "14 worker(s)": {"lines": [line]}}},
        ladder={"rungs": cifar["rungs"], "num_workers": 14},
    )
    shown = render.mnist_on_gpu()
    assert "| lesson 01 | 4.00 | 2.00, 2.50 | 24,000 | 99.00% |" in shown
    assert "| `map` | 2,000 ± 1 | 2,000 ± 1 | 2,000 ± 1 |" in shown and "have 14 of them" in shown
    assert "have 14 of them" in render.ladder()
    assert "| 14 worker(s) | `loss.backward()` | 44.2 |" in render.line_profiles()


def test_a_loader_that_failed_is_not_shown(results: Path) -> None:
    """Its figures are missing, and those of the others are there."""
    write(results, 1)
    rungs = json.loads((results / "made_up_1gpu.json").read_text())["ladder"]["rungs"]
    del rungs["dali"]
    add(results, 1, ladder={"rungs": rungs, "num_workers": 14, "failed": {"dali": "RuntimeError: no engine"}})
    (line,) = (line for line in render.ladder().splitlines() if line.startswith("| `dali`"))
    assert line.endswith("|  |  |  |")
