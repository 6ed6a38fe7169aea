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
    assert "full U-Net" not in render_compute.precision_ladder()
    write(results, 1)
    shown = render_compute.precision_ladder()
    assert "| options | 100 ± 1 | 100 ± 1 | 100 ± 1 | 100% |" in shown
    assert "| `gemm` | 3.0 | 1.50 | 75.0% |" in shown


@pytest.mark.parametrize(
    ("experiment", "missing"), [("unet3d_throughput", "full U-Net, samples/s"), ("trace", "A traced step takes")]
)
def test_what_was_cut_off_about_the_full_unet_is_not_shown(results: Path, experiment: str, missing: str) -> None:
    write(results, 1)
    file = results / "made_up_1gpu.json"
    records = json.loads(file.read_text())
    assert missing in render_compute.precision_ladder()
    records[experiment]["unfinished"] = True
    file.write_text(json.dumps(records))
    shown = render_compute.precision_ladder()
    assert missing not in shown
    assert "Made-up GPU x1" in shown
