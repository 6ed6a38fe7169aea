"""The studies of lessons 01 to 04 on simulated GPUs, with little work: what they store is what the pages say."""

import json
from pathlib import Path

import pytest
from nullgpu import gpus

from conftest import Script

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.thorough]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which experiments store their tables."""
    monkeypatch.setenv("WORKSHOP_RESULTS", str(tmp_path))
    return tmp_path


def rows(folder: Path, name: str) -> list[list]:
    """The rows of a stored table."""
    (file,) = folder.glob(f"*/{name}.json")
    return json.loads(file.read_text())["rows"]


def test_where_the_time_of_a_simulated_gpu_shows(stored: Path, run_script: Script) -> None:
    result = run_script("01_single_gpu/experiments/simulated_gpu.py", "--rounds", 2, "--limit_train", 2000)
    assert result.status == 0, result.stderr
    lines = {row[0]: [cell[0] for cell in row[1:]] for row in rows(stored, "simulated_lines")}
    (reading,) = (cells for line, cells in lines.items() if "loss.item()" in line)
    assert reading[2] > reading[3], "in every step the loop waits there"
    for name in ("simulated_loaders", "simulated_overlap"):
        assert len(rows(stored, name)) == 2
        assert list(stored.glob(f"*/{name}.png"))


def test_scaling_over_simulated_gpus(stored: Path, run_script: Script) -> None:
    flags = ("--ranks", 1, 2, "--rounds", 1, "--benchmark_seconds", 0.01)
    result = run_script("03_ddp/experiments/simulated_scaling.py", *flags)
    assert result.status == 0, result.stderr
    found = rows(stored, "simulated_scaling")
    assert [row[:3] for row in found] == [["both", 1, 512], ["weak", 2, 512], ["strong", 2, 256]]
    inside = gpus.read("t4")["clock"]["inside"]["bandwidth"]
    all_reduce = 1e3 * 4 * 11.7e6 / inside  # ms, of 11.7 million gradients over two ranks
    computing = 30  # ms at least that the GPU needs for 512 images; the host may need longer
    for _, ranks, _, _, one_bucket, *_ in found[:2]:
        assert one_bucket > computing + (0.9 * all_reduce if ranks > 1 else 0)


def test_dataparallel_beside_ddp_on_simulated_gpus(stored: Path, run_script: Script) -> None:
    result = run_script("02_dataparallel/experiments/simulated_gpus.py", "--rounds", 1)
    assert result.status == 0, result.stderr
    found = rows(stored, "simulated_dataparallel")
    assert [row[0] for row in found] == [1, 2, 4]
    for _, *cells in found[1:]:
        assert cells[0] < found[0][1] * 1.5, "the threads of several GPUs are timed, and share the batch"


def test_batches_that_are_cut_ahead(stored: Path, run_script: Script) -> None:
    flags = ["--unet_width", 16, "--unet_depth", 3, "--crop_size", 16, "--train_crops", 640, "--benchmark_seconds", 0.3]
    result = run_script("04_mixed_precision/experiments/loader_overlap.py", "--simulated", "l4", "--rounds", 1, *flags)
    assert result.status == 0, result.stderr
    io = [row[1][0] for row in rows(stored, "loader_overlap_simulated")]
    assert io[0] < io[1] and io[0] < io[2]
    assert next(stored.rglob("loader_overlap.png")).stat().st_size > 10_000


def test_what_formats_and_graphs_gain_on_a_simulated_gpu(stored: Path, run_script: Script) -> None:
    flags = ("--rounds", 1, "--benchmark_seconds", 0.01, "--workload", "a small network")
    result = run_script("04_mixed_precision/experiments/simulated_gains.py", *flags)
    assert result.status == 0, result.stderr
    graph = rows(stored, "simulated_gains")[-1]
    assert graph[0] == "bf16, CUDA graph" and graph[2] > 1, "one launch takes less of the host than many"


def test_ranks_wait_for_each_other_if_each_sorts_its_own_sequences(stored: Path, run_script: Script) -> None:
    flags = ("--steps", 16, "--compare", "alone", "similar")
    result = run_script("03_ddp/experiments/sequence_lengths.py", *flags)
    assert result.status == 0, result.stderr
    alone, similar = rows(stored, "sequence_lengths")
    assert alone[1] < 0.3 and similar[1] < 0.3, "hardly any padding in both"
    assert alone[3] > similar[3] + 0.1, "but one rank has long sequences and another one short ones"
    assert similar[4] > 1.1 * alone[4]


def test_only_the_former_backend_of_nccl_overlaps_with_backward(stored: Path, run_script: Script) -> None:
    result = run_script("03_ddp/experiments/nccl_backends.py", "--simulated", "--model", "resnet18")
    assert result.status == 0, result.stderr
    former, new = rows(stored, "nccl_backends_simulated")
    assert former[3] > 0.1, "on a busy host, kernels of backward are launched late"
    assert new[3] < 0.02
