"""How much of the all-reduces overlaps with backward: the analysis of hand-made traces; and what it refuses."""

import gzip
import importlib.util
import json
import subprocess
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conftest import REPOSITORY, Script
from workshop.errors import UserError

SCRIPT = REPOSITORY / "03_ddp" / "experiments" / "nccl_backends.py"
Kernel = tuple[str, float, float, float]
"""name; when it was launched, when it ran and how long, in milliseconds"""
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nccl_backends", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace_of(*kernels: Kernel, backward: tuple[tuple[float, float], ...] = ((10, 10),)) -> list[dict]:
    """The events of a trace: ranges of backward (start and length in milliseconds) on the CPU, launches and kernels."""
    events: list[dict] = [{"ph": "M", "name": "process_name", "ts": 0.0}]
    for start, length in backward:
        place = {"ts": 1000 * start, "dur": 1000 * length}
        events.append({"cat": "user_annotation", "name": "backward", **place})
        events.append({"cat": "gpu_user_annotation", "name": "backward", **place})  # not to be taken for a second one
    for number, (name, launched, start, length) in enumerate(kernels):
        args = {"correlation": number}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": 1000 * launched, "dur": 5.0}
        kernel = {"cat": "kernel", "name": name, "ts": 1000 * start, "dur": 1000 * length}
        events += [launch | {"args": args}, kernel | {"args": args}]
    return events


OVERLAPPING = [
    ("sgemm forward", 5, 8, 20),  # runs beside the first all-reduce, but was launched before backward
    ("sgemm backward", 11, 30, 10),
    ("sgemm backward", 12, 40, 10),
    (ALL_REDUCE, 13, 25, 20),  # 15 of it beside backward
    (ALL_REDUCE, 19, 50, 4),  # the last bucket
    ("sgd", 22, 50, 4),  # launched after backward
    (ALL_REDUCE, 30, 60, 9),  # the sum of the losses
]
ONE_AFTER_THE_OTHER = [
    ("sgemm backward", 11, 30, 10),
    (ALL_REDUCE, 12, 40, 20),
    ("sgemm backward", 13, 60, 10),
    (ALL_REDUCE, 19, 70, 4),
]


@pytest.mark.parametrize(("kernels", "both"), [(OVERLAPPING, 15), (ONE_AFTER_THE_OTHER, 0)], ids=["beside", "after"])
def test_the_overlap_in_a_step(script: ModuleType, kernels: list[Kernel], both: float) -> None:
    times = script.overlap(trace_of(*kernels))
    assert times["all_reduce_milliseconds"] == pytest.approx(24)
    assert times["backward_milliseconds"] == pytest.approx(20)
    assert times["both_milliseconds"] == pytest.approx(both)


def test_the_overlap_is_that_of_a_mean_step(script: ModuleType) -> None:
    later = [(name, launched + 100, start + 100, length) for name, launched, start, length in ONE_AFTER_THE_OTHER]
    times = script.overlap(trace_of(*OVERLAPPING, *later, backward=((10, 10), (110, 10))))
    assert times["both_milliseconds"] == pytest.approx(7.5)
    assert times["all_reduce_milliseconds"] == pytest.approx(24)


def test_time_of_kernels_that_run_side_by_side_counts_once(script: ModuleType) -> None:
    kernels = [("a", 11, 30, 10), ("b", 12, 32, 10), (ALL_REDUCE, 13, 30, 12), (ALL_REDUCE, 14, 31, 5)]
    times = script.overlap(trace_of(*kernels))
    assert times == pytest.approx({"all_reduce_milliseconds": 12, "backward_milliseconds": 12, "both_milliseconds": 12})


@pytest.mark.parametrize("kernels", [[], OVERLAPPING[:3]], ids=["no kernels", "no all-reduces"])
def test_a_trace_that_shows_no_communication_is_refused(script: ModuleType, kernels: list[Kernel]) -> None:
    with pytest.raises(UserError, match="the trace has 1 backward passes"):
        script.overlap(trace_of(*kernels))


@pytest.mark.parametrize("variable", ["0", "1"])
def test_each_backend_is_chosen_for_ranks_of_its_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """The rank that waits less counts."""

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        assert env["TORCH_DIST_USE_NCCL2"] == variable
        folder = Path(command[command.index("--run_dir") + 1])
        for rank, kernels in enumerate((OVERLAPPING, [*OVERLAPPING, (ALL_REDUCE, 14, 80, 10)])):
            with gzip.open(folder / f"rank{rank}.pt.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": trace_of(*kernels)}, file)
        (folder / "summary.json").write_text(json.dumps({"backend_class": f"class {variable}"}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    row = script.trace(tmp_path, Namespace(batch_size=8, steps=20, model="resnet50"), variable)
    assert row["backend_class"] == f"class {variable}"
    assert row["all_reduce_milliseconds"] == pytest.approx(24)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has two GPUs")
def test_without_two_gpus_it_is_one_line(run_script: Script, tmp_path: Path) -> None:
    result = run_script("03_ddp/experiments/nccl_backends.py", "--out", tmp_path)
    assert result.status == 2
    assert result.stderr == (
        f"error: this compares two NCCL backends, which takes 2 GPUs; this machine shows {torch.cuda.device_count()}\n"
    )
