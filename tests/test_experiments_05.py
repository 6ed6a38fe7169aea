"""The experiments of lesson 05 with little work: what they count and compute is what the pages say."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

import checkpoint_cost
import memory_model
import quick_python
import step_time
import what_fills_memory
from conftest import REPOSITORY, Script
from lab.launching import torchrun
from lab.simulated import null_gpu as on_null_gpu
from memory_model import Prediction, Setup, predict, workload
from ranks import start_ranks
from workshop.errors import UserError
from workshop.models.gpt import gpt_size

LESSON = REPOSITORY / "05_fully_sharded"
FOLDER = "05_fully_sharded/experiments"
Rows = dict[str, list]
null_gpu = pytest.mark.skipif(
    shutil.which("g++") is None or torch.version.cuda is None,
    reason="the null GPU needs g++ and a PyTorch with CUDA",
)


def rows_of(folder: Path, name: str) -> Rows:
    """The rows of a stored table, by their first cell."""
    (file,) = folder.glob(f"*/{name}.json")
    return {row[0]: row[1:] for row in json.loads(file.read_text())["rows"]}


def on_ranks(count: int, script: str, folder: Path, *flags: object) -> None:
    """Run an experiment as so many ranks, which store their tables below ``folder``."""
    environment = os.environ | {"WORKSHOP_RESULTS": str(folder)}
    results = start_ranks(count, f"experiments/{script}", *flags, cwd=LESSON, environment=environment)
    assert {result.status for result in results} == {0}, results[0].stderr
    assert all(result.stdout == "" for result in results[1:])


def with_torchrun(count: int, script: str, folder: Path, *flags: object) -> None:
    """The same with torchrun and Python itself: a null GPU is loaded when Python starts, so no fork has one."""
    environment = os.environ | {"WORKSHOP_RESULTS": str(folder), "PYTHONPATH": str(REPOSITORY)}
    command = [*torchrun(count), f"experiments/{script}", *map(str, flags)]
    result = subprocess.run(command, cwd=LESSON, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# On ranks.


@null_gpu
@pytest.mark.slow  # a change of the lesson's script makes it fail
def test_one_step_counts_collectives_and_has_the_losses_of_ddp(tmp_path: Path) -> None:
    with_torchrun(2, "one_step.py", tmp_path, "--width", 64)
    ddp, blocks, keep, root = rows_of(tmp_path, "one_step").values()
    assert ddp[0] >= 1
    # four blocks, and the rest; two all-reduces, of the number of tokens and of the norm of the gradients
    assert [row[:3] for row in (blocks, keep, root)] == [[2, 9, 5], [2, 5, 5], [2, 1, 1]]
    for row in (blocks, keep, root):
        assert row[-1] == pytest.approx(ddp[-1], rel=1e-5)
        assert row[3] == pytest.approx(ddp[3] * 3 / 4 / 2, rel=0.05)  # DDP has a fourth number per weight, its buckets
    assert blocks[4] < keep[4] < root[4]
    (file,) = tmp_path.glob("*/stored_weight.json")
    assert [row[1:] for row in json.loads(file.read_text())["rows"]] == [
        [0, "`Tensor`", "`(192, 64)`", None, "`(192, 64)`"],
        [1, "`Tensor`", "`(192, 64)`", None, "`(192, 64)`"],
        [0, "`DTensor`", "`(192, 64)`", "`(Shard(dim=0),)`", "`(96, 64)`"],
        [1, "`DTensor`", "`(192, 64)`", "`(Shard(dim=0),)`", "`(96, 64)`"],
    ]


@null_gpu
def test_collectives_of_accumulation_and_equal_gradients(tmp_path: Path) -> None:
    with_torchrun(2, "accumulation.py", tmp_path, "--width", 64)
    rows = list(rows_of(tmp_path, "accumulation").values())
    assert [row[:2] for row in rows] == [[13, 7], [52, 28], [52, 7], [31, 7]]
    assert all(difference < 1e-5 for *_, difference in rows[1:])
    whole, each, last, _ = (row[2] for row in rows)
    assert each < last < whole


def test_a_step_changes_few_weights_in_bf16(tmp_path: Path) -> None:
    width = 64
    on_ranks(2, "small_updates.py", tmp_path, "--width", width)
    rows = rows_of(tmp_path, "small_updates")
    assert all(in_float32 > 0.99 for in_float32, _ in rows.values())
    size = gpt_size("gpt_tiny", width)
    added = size.depth * (width + size.hidden) * width / size.parameters  # `out` and `down`, with smaller weights
    normal = NormalDist()
    for rate, limit in (("0.0001", 2**-5), ("1e-05", 2**-8)):  # larger weights are too far from the next number in bf16
        below, below_added = (2 * normal.cdf(limit / std) - 1 for std in (0.02, 0.02 / math.sqrt(2 * size.depth)))
        assert rows[rate][1] == pytest.approx((1 - added) * below + added * below_added, abs=0.02)


def test_each_layout_of_four_ranks_trains_as_one_process_and_sends_what_the_page_says(tmp_path: Path) -> None:
    on_ranks(4, "tensor_parallel.py", tmp_path)
    rows = rows_of(tmp_path, "tensor_parallel_4_ranks")
    blocks = 4
    sharded = [2 * blocks + 1, blocks + 1]  # the rest of the model stays gathered
    assert {name: row[:3] for name, row in rows.items()} == {
        "FSDP2 on 4": [*sharded, 0],
        "TP on 4": [0, 0, 4 * blocks],  # two in forward and two in backward
        "TP on 4, without PrepareModuleInput": [0, 0, 7 * blocks],  # q, k, v, gate, up: each the gradient of its input
        "FSDP2 on 2 x TP on 2": [*sharded, 4 * blocks],
        "HSDP: 2 copies, each on 2": [*sharded, blocks + 1],
    }
    assert all(difference < 1e-5 for *_, difference in rows.values())
    activations = 16 * 16 * 64 * 4  # samples, tokens, numbers that describe a token, bytes
    assert rows["TP on 4"][3] == pytest.approx(4 * blocks * activations / 1e6)
    placements = rows_of(tmp_path, "tensor_parallel_placements")
    assert placements["HSDP: 2 copies, each on 2"] == ["`Replicate(), Shard(dim=0)`", "128 x 64"]


# One process.


@pytest.fixture
def quickly(run_script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs a script whose ranks begin without importing torch anew."""
    monkeypatch.setattr("lab.launching.PYTHON", str(quick_python.commands() / "python"))
    return run_script


def test_checkpoints_around_blocks_save_memory_and_around_layers_little(run_script: Script, tmp_path: Path) -> None:
    flags = ("--width", 64, "--depth", 4, "--sequence_length", 64)
    assert run_script(f"{FOLDER}/recompute.py", *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    none, block, second, layer = rows_of(tmp_path, "recompute").values()
    assert block[0] < 0.2 * none[0] < second[0] < none[0]
    assert 0.9 * none[0] < layer[0] < none[0], "of the layers, only a norm keeps more than its input"
    assert block[1] < second[1] < 0.9 * none[1] < layer[1]
    assert none[2] == layer[2]
    assert 0.1 < block[3] < 0.34


def test_what_some_ranks_save_fewer_and_more_ranks_continue(quickly: Script, tmp_path: Path) -> None:
    flags = ("--width", 64, "--depth", 2, "--trials", 2)
    result = quickly(f"{FOLDER}/save_and_reshard.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    rows = rows_of(tmp_path, "save_and_reshard")
    four, one = rows["not stopped, 4 ranks"], rows["not stopped, 1 rank"]
    assert list(rows)[1:5] == [f"saved by 4, resumed by {ranks}" for ranks in (4, 2, 3, 1)]
    assert rows["saved by 4, resumed by 4"][:2] == four[:2], "on as many ranks bit by bit"
    assert all(row[:2] == pytest.approx(four[:2], rel=1e-5) for row in rows.values())
    assert rows["saved by 1, resumed by 4"][:2] == pytest.approx(one[:2], rel=1e-5)
    for waits, complete in rows_of(tmp_path, "saving_seconds").values():
        assert 0 < waits[0] <= complete[0]


def test_throughput_of_ddp_and_of_each_form_of_sharding(quickly: Script, tmp_path: Path) -> None:
    flags = ("--tiny", "true", "--seconds", 0.01)
    result = quickly(f"{FOLDER}/sharded_throughput.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    rows = rows_of(tmp_path, "sharded_throughput")
    assert [name.split(",")[0] for name in rows] == ["DDP", "FSDP2", "FSDP2", "FSDP2", "DDP", "FSDP2"]
    assert all(speed[0] > 0 and mfu > 0 and memory > 0 for speed, mfu, memory in rows.values())
    too_many = ("--batch_size", 10**12)
    assert quickly(f"{FOLDER}/sharded_throughput.py", *flags, *too_many, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    assert [row[0] for row in rows_of(tmp_path, "sharded_throughput").values()] == 6 * ["out of memory"]


@null_gpu
def test_what_fills_the_memory_and_which_cure_helps(run_script: Script, tmp_path: Path) -> None:
    script, flags = f"{FOLDER}/what_fills_memory.py", ("--model", "gpt2_124m", "--batch_size", "1,16")
    assert run_script(script, *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    one, many = rows_of(tmp_path, "what_fills_memory").values()
    weights = 4 * workload("gpt2_124m").size.parameters / 1e9
    for stored_weights, gradients, optimizer, kept, peak, moment in (one, many):
        assert (stored_weights, gradients, optimizer) == pytest.approx((weights, weights, 2 * weights), rel=1e-3)
        assert peak > stored_weights + optimizer + kept
        assert moment == "backward"
    assert many[3] == pytest.approx(16 * one[3], rel=0.05), "activations grow with the batch"
    few, large = rows_of(tmp_path, "what_helps").values()
    assert few[-1] == "shard" and few[5] == "-"
    assert (large[1], large[-1]) == ("backward", "split the batch, recompute")


@null_gpu
def test_on_a_gpu_the_same_steps_are_measured(user_environment: dict[str, str], tmp_path: Path) -> None:
    """The GPU is a null GPU of 16 GiB here; the forecast of the null GPU is that of one without a limit."""
    environment = user_environment | {"WORKSHOP_RESULTS": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    flags = ("experiments/what_fills_memory.py", "--model", "gpt2_124m", "--batch_size", "1,16")
    command = [*on_null_gpu("--gb", 16), "python", *flags]
    result = subprocess.run(command, cwd=LESSON, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    one, many = rows_of(tmp_path, "forecast_and_gpu").values()
    assert one[1] == pytest.approx(one[0], rel=0.01)
    assert many[1:] == ["out of memory", None]


def test_a_cure_that_does_not_help_is_not_recommended() -> None:
    advice = what_fills_memory.advice
    assert advice(100, [90, 50, 40]) == "split the batch, recompute"
    assert advice(100, [90, 50, None]) == "recompute"
    assert advice(100, [99, 99, 99]) == "no cure alone"


def small(**values: object) -> Setup:
    return Setup(**({"model": "gpt_tiny", "batch_size": 1, "ranks": 8, "way": "blocks", "depth": 4} | values))


@null_gpu
def test_the_ways_of_sharing_differ_as_the_page_says() -> None:
    larger = {"width": 512, "batch_size": 2}
    ways = ("ddp", "blocks", "keep", "root")
    setups = [small(**larger, way="alone", ranks=1), *(small(**larger, way=way) for way in ways)]
    others = [small(**larger, checkpointing=True), small(**larger, ranks=32), small(**larger, ranks=32, replicas=4)]
    alone, ddp, blocks, keep, root, recomputed, many, hsdp = predict(*setups, *others)
    assert ddp.stored - alone.stored == pytest.approx(4 * alone.parameters, rel=0.01), "the buckets"
    assert ddp.peak > 16 * ddp.parameters
    assert blocks.peak < keep.peak < root.peak < ddp.peak
    assert keep.kept - blocks.kept > 4 * 0.8 * blocks.parameters, "the gathered weights"
    assert recomputed.kept < blocks.kept / 2 and recomputed.peak < blocks.peak
    assert many.peak > blocks.peak / 4, "activations are not sharded"
    assert many.weights == pytest.approx(blocks.weights / 4, rel=0.01)
    assert hsdp.peak == pytest.approx(blocks.peak, rel=0.01)
    for found in (alone, ddp, blocks):
        assert found.peak == found.peaks[found.moment] <= found.reserved


@null_gpu
def test_the_forecast_does_not_depend_on_what_is_asked_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = small(precision="bf16")
    (alone,) = predict(setup)
    monkeypatch.setattr(memory_model, "_known", {})
    assert predict(small(batch_size=4), small(way="ddp"), setup)[-1] == alone


@null_gpu
def test_will_it_fit_stores_memory_time_and_cost(run_script: Script, tmp_path: Path) -> None:
    flags = (
        "--num_blocks",
        1,
        "--ranks",
        "2,2x2",
        "--ways",
        "ddp,blocks",
        "--checkpointing",
        "false",
        "--tokens",
        3.6e9,
    )
    assert run_script(f"{FOLDER}/will_it_fit.py", *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    memory = rows_of(tmp_path, "will_it_fit_gpt_tiny")
    assert list(memory) == ["DDP on 2", "`blocks` on 2", "`blocks` on 4 in 2 groups (HSDP)"]
    for stored, kept, forward, backward, optimizer, peak, reserved, moment in memory.values():
        peaks = {"forward": forward, "backward": backward, "optimizer": optimizer}
        assert peak == max(peaks.values()) == peaks[moment] <= reserved
        assert stored + kept < peak
    for computing, sending, slow, fast, least, most, days in rows_of(tmp_path, "how_long_gpt_tiny").values():
        assert (slow, fast) == pytest.approx((128 / (computing + sending), 128 / max(computing, sending)))
        assert (least, most) == pytest.approx((1e6 / fast, 1e6 / slow))
        assert days < least / 24


@null_gpu
@pytest.mark.slow  # a change of the lesson's script makes it fail
def test_the_lesson_runs_out_of_memory_and_is_cured_as_forecast(run_script: Script, tmp_path: Path) -> None:
    flags = ("--gb", 16, "--only", "1 rank")
    result = run_script(f"{FOLDER}/out_of_memory.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    plain, split, recomputed = rows_of(tmp_path, "out_of_memory").values()
    assert plain[0] == "out of memory" and plain[1] > 16 * 2**30 / 1e9
    for found, forecast in (split, recomputed):
        assert found == pytest.approx(forecast, rel=0.01)


@null_gpu
@pytest.mark.thorough
def test_blocks_compute_less_beside_the_products_and_send_more_than_ddp(run_script: Script, tmp_path: Path) -> None:
    flags = ("--only", "gpt2_124m", "--updates", 5)
    result = run_script(f"{FOLDER}/ddp_or_blocks.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    ddp, blocks = rows_of(tmp_path, "ddp_or_blocks").values()
    computes, differing, collectives, gigabytes, peak = zip(ddp, blocks, strict=True)
    assert computes[0] > computes[1] and differing[0] > differing[1]
    assert collectives[0] < collectives[1] and gigabytes[0] < gigabytes[1] < 2 * gigabytes[0]
    assert peak[0] > peak[1]


@null_gpu
def test_the_forecast_is_what_others_have_measured(run_script: Script, tmp_path: Path) -> None:
    result = run_script(f"{FOLDER}/will_it_fit.py", "--published", "true", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    rows = list(rows_of(tmp_path, "published_forecast").values())
    for nothing, half, everything, published in (rows[:4], rows[4:]):
        assert half[1] == pytest.approx(published[1], rel=0.03)
        assert everything[0] < half[0] < nothing[0]
        assert everything[2] < published[2] < nothing[3]


def test_saving_every_so_often_costs_least(run_script: Script, tmp_path: Path) -> None:
    save, between = 84.0, 3600.0 * 800
    best = checkpoint_cost.best_interval(save, between)
    lost = [checkpoint_cost.lost_share(factor * best, save, between) for factor in (0.9, 1, 1.1)]
    assert min(lost) == lost[1] and lost[1] == pytest.approx((2 * save / between) ** 0.5)
    assert run_script(f"{FOLDER}/checkpoint_cost.py", WORKSHOP_RESULTS=str(tmp_path)).status == 0
    rows = rows_of(tmp_path, "checkpoint_cost")
    assert rows["7 billion on 64 GPUs, 1 GB/s"][:3] == [84, 84, "yes"]
    assert rows["70 billion on 512 GPUs, 1 GB/s"][:3] == [840, 840, "no"]


def test_bytes_and_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    network = step_time.Network()
    node = 1e9 * network.adapters * network.gb_per_second
    nvlink = 1e9 * step_time.NVLINK_GB_PER_SECOND
    monkeypatch.setattr(step_time, "HOP_WITHIN", 0.0)
    monkeypatch.setattr(step_time, "HOP_BETWEEN", 0.0)
    inside, outside = step_time.parameter_counts("gpt_tiny", 0)
    weights = inside + outside

    def seconds(network: step_time.Network = network, **values: object) -> float:
        return step_time.communication_seconds(small(**{"depth": 0} | values), network)

    gathered = 3 / 4 * 4 * (2 * inside + outside)  # a rank gets this part from others
    reduced = 3 / 4 * 4 * weights
    assert seconds(ranks=4) == pytest.approx((gathered + reduced) / nvlink)
    assert seconds(ranks=4, batch_size=8, parts=8) == pytest.approx((8 * gathered + reduced) / nvlink)
    assert seconds(ranks=4, way="ddp") == pytest.approx(2 * reduced / nvlink)
    assert seconds(ranks=64, way="ddp") == pytest.approx(2 * 63 / 64 * 4 * weights / node), "a ring for each adapter"
    between = 2 * 7 / 8 * 4 * weights / 8 / (1e9 * network.gb_per_second)
    assert seconds(ranks=64, replicas=8) == pytest.approx(seconds(ranks=8) + between)
    # What HSDP is for: a slow network between the nodes, and weights that are gathered for each part of a batch.
    slow = step_time.Network(adapters=1, gb_per_second=25)
    parts = {"ranks": 64, "batch_size": 8, "parts": 8}
    assert seconds(slow, **parts, replicas=8) < seconds(slow, **parts) / 4

    monkeypatch.setattr(step_time, "HOP_WITHIN", 1.0)
    monkeypatch.setattr(step_time, "HOP_BETWEEN", 10.0)
    assert seconds(ranks=4, way="root") == pytest.approx(2 * 3, rel=0.01)
    blocks = len(workload("gpt_tiny").build(0).blocks)
    assert seconds(ranks=4) == pytest.approx(3 * (3 * blocks + 2), rel=0.01)
    assert seconds(ranks=16, way="root") == pytest.approx(2 * (14 + 10), rel=0.01), "one message between two nodes"

    flops, tokens = step_time.flops_of_step(small(depth=0, batch_size=4)), 4 * 128
    assert flops == pytest.approx(tokens * workload("gpt_tiny").size.flops_per_token(128), rel=1e-6)
    assert flops < step_time.flops_of_step(small(depth=0, batch_size=4, checkpointing=True)) < 4 / 3 * flops


def test_without_a_compiler_the_null_gpu_says_what_to_install(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_model, "_known", {})
    flags = {"PATH": str(tmp_path), "NULLGPU_CACHE": str(tmp_path), "WORKSHOP_RESULTS": str(tmp_path)}
    error = run_script(f"{FOLDER}/will_it_fit.py", **flags).error
    assert error.startswith("the null GPU ") or "built without CUDA" in error
    assert "install" in error or "needs Linux" in error


def test_experiments_that_count_collectives_leave_the_peaks_out_without_a_null_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impossible(*setups: Setup) -> list[Prediction]:
        raise UserError("the null GPU needs a C++ compiler")

    monkeypatch.setattr(memory_model, "predict", impossible)
    assert memory_model.peaks_if_possible(small(), small(ranks=2)) == [None, None]
    assert capsys.readouterr().err == "warning: the peaks are left out: the null GPU needs a C++ compiler\n"


def test_a_step_that_fails_is_shown_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('the reason')")
    monkeypatch.setattr(memory_model, "SCRIPT", script)
    with pytest.raises(UserError, match="ValueError: the reason"):
        memory_model.measure(small(ranks=1))
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("recompute.py", ("--width", 30), "--width 30 is no multiple of the head dimension 64"),
        ("accumulation.py", ("--batch_size", 2), "--batch_size 2 has no 4 parts"),
        ("same_losses.py", ("--ranks", "1,5"), "takes divisors of 24 with commas between them, got 1,5"),
        ("tensor_parallel.py", (), "the four attention heads are divided over 2 or 4 ranks"),
        ("what_fills_memory.py", ("--model", "gpt_2b"), "does not know 'gpt_2b'; did you mean gpt_"),
        ("out_of_memory.py", ("--only", "nothing"), "no row has 'nothing' in its name: `gpt2_124m`, 1 rank"),
        ("what_fills_memory.py", ("--batch_size", "1,x"), "takes positive numbers, separated by commas, got '1,x'"),
        ("will_it_fit.py", ("--ranks", "0"), "takes numbers of ranks such as 8,64,8x8, got '0'"),
        ("will_it_fit.py", ("--model", "gpt_8b"), "does not know 'gpt_8b'; did you mean gpt_"),
        (
            "will_it_fit.py",
            ("--batch_size", 3, "--accumulate", 2),
            "--batch_size 3 cannot be divided into 2 equal parts",
        ),
    ],
)
def test_a_mistake_is_one_line(run_script: Script, script: str, flags: tuple, message: str, tmp_path: Path) -> None:
    assert message in run_script(f"{FOLDER}/{script}", *flags, WORKSHOP_RESULTS=str(tmp_path)).error
