"""The experiments of lesson 05 with little work: what they count and compute is what the pages say."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memory_model
import quick_python
import step_time
import what_fills_memory
from conftest import REPOSITORY, Script
from memory_model import Setup, predict
from ranks import start_ranks
from workshop.errors import UserError

LESSON = REPOSITORY / "05_fully_sharded"
FOLDER = "05_fully_sharded/experiments"
Rows = dict[str, list]


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


# On ranks.


def test_one_step_counts_collectives_and_has_the_losses_of_ddp(tmp_path: Path) -> None:
    on_ranks(2, "one_step.py", tmp_path, "--vit_width", 64)
    ddp, blocks, keep, root = rows_of(tmp_path, "one_step").values()
    assert ddp[0] >= 1
    assert [row[:3] for row in (blocks, keep, root)] == [[0, 9, 5], [0, 5, 5], [0, 1, 1]]  # four blocks, and the rest
    for row in (blocks, keep, root):
        assert row[-1] == pytest.approx(ddp[-1], rel=1e-5)
        assert row[3] == pytest.approx(ddp[3] / 2, rel=0.05)
    assert blocks[4] < keep[4] < root[4]
    (file,) = tmp_path.glob("*/stored_weight.json")
    assert [row[1:] for row in json.loads(file.read_text())["rows"]] == [
        [0, "`Tensor`", "`(256, 64)`", None, "`(256, 64)`"],
        [1, "`Tensor`", "`(256, 64)`", None, "`(256, 64)`"],
        [0, "`DTensor`", "`(256, 64)`", "`(Shard(dim=0),)`", "`(128, 64)`"],
        [1, "`DTensor`", "`(256, 64)`", "`(Shard(dim=0),)`", "`(128, 64)`"],
    ]


def test_collectives_of_accumulation_and_equal_gradients(tmp_path: Path) -> None:
    on_ranks(2, "accumulation.py", tmp_path, "--vit_width", 64)
    rows = list(rows_of(tmp_path, "accumulation").values())
    assert [row[:2] for row in rows] == [[13, 7], [52, 28], [52, 7], [31, 7]]
    assert all(difference < 1e-5 for *_, difference in rows[1:])
    whole, each, last, _ = (row[2] for row in rows)
    assert each < last < whole


def test_a_step_changes_few_weights_in_bf16(tmp_path: Path) -> None:
    on_ranks(2, "small_updates.py", tmp_path, "--vit_width", 32)
    rows = rows_of(tmp_path, "small_updates")
    assert all(in_float32 > 0.99 for in_float32, _ in rows.values())
    assert 0.2 < rows["0.0001"][1] < 0.7
    assert rows["1e-05"][1] < 0.15


def test_each_layout_of_four_ranks_trains_as_one_process_and_sends_what_the_page_says(tmp_path: Path) -> None:
    on_ranks(4, "tensor_parallel.py", tmp_path)
    rows = rows_of(tmp_path, "tensor_parallel_4_ranks")
    blocks = 4
    sharded = [2 * blocks + 1, blocks + 1]  # the rest of the model stays gathered
    assert {name: row[:3] for name, row in rows.items()} == {
        "FSDP2 on 4": [*sharded, 0],
        "TP on 4": [0, 0, 4 * blocks],  # two in forward and two in backward
        "TP on 4, without PrepareModuleInput": [0, 0, 6 * blocks],  # q, k, v each reduce the gradient of their input
        "FSDP2 on 2 x TP on 2": [*sharded, 4 * blocks],
        "HSDP: 2 copies, each on 2": [*sharded, blocks + 1],
    }
    assert all(difference < 1e-5 for *_, difference in rows.values())
    activations = 16 * 16 * 64 * 4  # samples, patches, numbers that describe a patch, bytes
    assert rows["TP on 4"][3] == pytest.approx(4 * blocks * activations / 1e6)
    placements = rows_of(tmp_path, "tensor_parallel_placements")
    assert placements["HSDP: 2 copies, each on 2"] == ["`Replicate(), Shard(dim=0)`", "128 x 64"]


UNUSUAL = {
    "the model, then each block": "fails",
    "validate under `torch.inference_mode()` first": "fails",
    "a validation under `torch.no_grad()`, then the optimizer, then training": "differs",
    "`copy.deepcopy` of the sharded model, as for an average of the weights": "fails",
    "`GradScaler`, a gradient of rank 1 overflows: both ranks must skip the step": "works",
    "`fully_shard`, then `parallelize_module`": "fails",
    "the lesson's block as it is: one layer for q, k and v": "fails",
    "one layer for q, k and v, heads counted on each rank": "differs",
    "the optimizer, then `fully_shard`": "differs",
    "tensor parallel: `clip_grad_norm_`, some weights are plain tensors": "fails",
    "tensor parallel and FSDP2: `clip_grad_norm_`, two meshes": "fails",
    "tensor parallel: AdamW with `foreach=True`, some weights are plain tensors": "fails",
    "with `torch.compile(model)`, `model.state_dict()`": "fails",
}
"""what comes of combinations that are neither equal nor close"""


def test_combinations_come_out_as_the_page_says(tmp_path: Path) -> None:
    on_ranks(2, "combinations.py", tmp_path, "--quick", "true")
    page = (LESSON / "experiments" / "combinations.md").read_text()
    found = {}
    for file in tmp_path.glob("*/combinations_*.json"):
        assert f"/{file.stem} -->" in page
        found |= {row[0]: row[1:] for row in json.loads(file.read_text())["rows"]}
    assert UNUSUAL.keys() < found.keys()
    for name, (result, seen) in found.items():
        usual = "close" if "stored as" in seen or "at once" in name else "equal"
        assert UNUSUAL.get(name, usual) in result, (name, result, seen)
    wrapped, after = (found[name][1] for name in found if "checkpoint_wrapper" in name)
    assert wrapped == after, "the order does not matter"
    assert "moved: 0%" in found["the optimizer, then `fully_shard`"][1]
    graphs = {name: seen for name, (_, seen) in found.items() if "graphs" in seen}
    assert [name for name, seen in graphs.items() if "compiled: 0" in seen] == [n for n in graphs if "partial" in n]


# One process.


@pytest.fixture
def quickly(run_script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs a script whose ranks begin without importing torch anew."""
    monkeypatch.setattr("lab.launching.PYTHON", str(quick_python.commands() / "python"))
    return run_script


def test_checkpoints_around_blocks_save_memory_and_around_layers_nothing(run_script: Script, tmp_path: Path) -> None:
    flags = ("--vit_width", 32, "--vit_depth", 4)
    assert run_script(f"{FOLDER}/recompute.py", *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    none, block, second, layer = rows_of(tmp_path, "recompute").values()
    assert block[0] < 0.2 * none[0] < second[0] < none[0]
    assert layer[0] == pytest.approx(none[0], rel=0.02)
    assert block[1] < second[1] < none[1] < layer[1] / 0.98
    assert none[2] == layer[2]
    assert 0.1 < block[3] < 0.34


def test_losses_are_those_of_ddp(quickly: Script, tmp_path: Path) -> None:
    flags = ("--ranks", "2", "--limit_train", 640)
    result = quickly(f"{FOLDER}/same_losses.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    ddp, sharded = rows_of(tmp_path, "same_losses").values()
    assert sharded == pytest.approx(ddp, rel=1e-5)


def test_what_two_ranks_save_one_and_four_ranks_continue(quickly: Script, tmp_path: Path) -> None:
    flags = ("--vit_width", 16, "--trials", 2)
    result = quickly(f"{FOLDER}/save_and_reshard.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    expected, *resumed = rows_of(tmp_path, "save_and_reshard").values()
    assert resumed[1][:2] == expected[:2], "on as many ranks bit by bit"
    assert all(row[:2] == pytest.approx(expected[:2], rel=1e-5) for row in resumed)
    for waits, complete in rows_of(tmp_path, "saving_seconds").values():
        assert 0 < waits[0] <= complete[0]


def test_what_fills_the_memory_adds_up_and_names_the_cure(run_script: Script, tmp_path: Path) -> None:
    script, flags = f"{FOLDER}/what_fills_memory.py", ("--model", "unet3d", "--batch_size", "1,64")
    assert run_script(script, *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    one, many = rows_of(tmp_path, "what_fills_memory").values()
    for *parts, peak in (one, many):
        assert sum(parts) == pytest.approx(peak)
        assert parts[2] == 2 * parts[0], "two means for each weight"
    few, large = rows_of(tmp_path, "what_helps").values()
    assert (few[1], few[-1]) == ("optimizer", "shard")
    assert (large[1], large[-1]) == ("backward", "split the batch")
    assert few[5] == "-" and large[4] == large[0], "a block of the U-Net is a single convolution"


def test_a_cure_that_does_not_help_is_not_recommended() -> None:
    advice = what_fills_memory.advice
    assert advice(100, [90, 50, 40]) == "split the batch, recompute"
    assert advice(100, [90, 50, None]) == "recompute"
    assert advice(100, [99, 99, 99]) == "no cure alone"


def small(**values: object) -> Setup:
    return Setup(**({"model": "gpt_small", "batch_size": 4, "ranks": 8, "way": "blocks", "depth": 4} | values))


def test_the_ways_of_sharing_differ_as_the_page_says() -> None:
    alone, ddp = predict(small(way="alone", ranks=1)), predict(small(way="ddp"))
    assert ddp.peak - alone.peak == 4 * alone.parameters, "the buckets"
    assert ddp.peak > 16 * ddp.parameters
    peaks = {way: predict(small(way=way)).peak for way in ("blocks", "keep", "root")}
    assert peaks["blocks"] < peaks["keep"] < peaks["root"] < ddp.peak
    assert predict(small(checkpointing=True)).peak < peaks["blocks"]
    many = predict(small(ranks=32))
    assert many.peak > peaks["blocks"] / 4, "activations are not sharded"
    assert predict(small(ranks=32, replicas=4)).peak == pytest.approx(peaks["blocks"], rel=0.01), "HSDP"
    assert sum(many.parts.values()) == many.peak


def test_will_it_fit_stores_memory_and_time(run_script: Script, tmp_path: Path) -> None:
    flags = ("--num_blocks", 1, "--ranks", "2,2x2", "--ways", "ddp,blocks", "--checkpointing", "false")
    assert run_script(f"{FOLDER}/will_it_fit.py", *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    memory = rows_of(tmp_path, "will_it_fit_vit")
    assert list(memory) == ["DDP on 2", "`blocks` on 2", "`blocks` on 4 in 2 groups (HSDP)"]
    for *parts, peak, moment in memory.values():
        assert sum(parts) == pytest.approx(peak)
        assert moment in ("forward", "backward", "optimizer")
    for computing, sending, full, none in rows_of(tmp_path, "will_it_fit_vit_seconds").values():
        assert (full, none) == (max(computing, sending), computing + sending)


def test_two_real_ranks_allocate_what_was_predicted(quickly: Script, tmp_path: Path) -> None:
    result = quickly(f"{FOLDER}/will_it_fit.py", "--check", "true", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    (file,) = tmp_path.glob("*/will_it_fit_check.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row[:2] for row in rows] == [
        ["DDP", "no"], ["`blocks`", "no"], ["`keep`", "no"], ["`root`", "no"], ["`blocks`", "yes"]
    ]  # fmt: skip
    for name, *_, difference in rows:
        assert -0.01 < difference < (0.08 if "blocks" in name else 0.01), "gloo copies what it gathers"


def test_bytes_and_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = step_time.parameter_counts("gpt_small", 0)
    setup = small(ranks=4, depth=0)
    nvlink = 1e9 * step_time.NODE_GB_PER_SECOND
    monkeypatch.setattr(step_time, "ALPHA_SECONDS", 0.0)
    gathered = 3 / 4 * 4 * (2 * inside + outside)  # a rank gets this part from others
    reduced = 3 / 4 * 4 * (inside + outside)
    assert step_time.communication_seconds(setup) == pytest.approx((gathered + reduced) / nvlink)
    ddp = step_time.communication_seconds(small(ranks=4, depth=0, way="ddp"))
    assert ddp == pytest.approx(2 * reduced / nvlink)
    network = step_time.GPUS_PER_NODE * 1e9 * step_time.ADAPTER_GB_PER_SECOND
    nodes = step_time.communication_seconds(small(ranks=64, depth=0, way="ddp"))
    assert nodes == pytest.approx(2 * 63 / 64 * 4 * (inside + outside) / network), "one ring for each adapter"
    hsdp, blocks = (step_time.communication_seconds(small(ranks=64, depth=0, replicas=groups)) for groups in (8, 1))
    between = 2 * 7 / 8 * 4 * (inside + outside) / 8 / (1e9 * step_time.ADAPTER_GB_PER_SECOND)
    within = step_time.communication_seconds(small(ranks=8, depth=0))
    assert hsdp == pytest.approx(within + between)
    assert hsdp != blocks
    monkeypatch.setattr(step_time, "ALPHA_SECONDS", 1.0)
    assert step_time.communication_seconds(small(ranks=4, depth=0, way="root")) == pytest.approx(2 * 3, rel=0.01)
    assert step_time.communication_seconds(setup) == pytest.approx(3 * (9 + 9 + 8), rel=0.01)
    flops, tokens = step_time.flops_of_step(setup), 4 * 64
    assert 6 * inside * tokens * 0.98 < flops < 1.5 * 6 * (inside + outside) * tokens
    assert flops < step_time.flops_of_step(small(depth=0, checkpointing=True)) < 4 / 3 * flops


@pytest.fixture
def other_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.fsdp2_mem_tracker", None)
    memory_model.private_tools.cache_clear()
    yield
    memory_model.private_tools.cache_clear()


@pytest.mark.usefixtures("other_torch")
def test_a_torch_without_the_private_parts_is_named() -> None:
    with pytest.raises(UserError, match=re.escape(f"torch {torch.__version__} lacks a private part")):
        predict(small(batch_size=5))


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("recompute.py", ("--vit_width", 30), "--vit_width 30 is not a multiple of 4"),
        ("accumulation.py", ("--batch_size", 2), "--batch_size 2 has no 4 parts"),
        ("same_losses.py", ("--ranks", "1,,2"), "takes numbers from 1 to 64 with commas between them, got 1,,2"),
        ("tensor_parallel.py", (), "the four attention heads are divided over 2 or 4 ranks"),
        ("combinations.py", ("--only", "nothing"), "no combination has this in its group or name"),
        ("what_fills_memory.py", ("--model", "unet"), "does not know 'unet'; did you mean unet3d?"),
        ("what_fills_memory.py", ("--batch_size", "1,x"), "takes positive numbers, separated by commas, got '1,x'"),
        ("will_it_fit.py", ("--ranks", "0"), "takes numbers of ranks such as 8,64,8x8, got '0'"),
        ("will_it_fit.py", ("--model", "vot"), "no model 'vot'; did you mean vit?"),
        ("will_it_fit.py", ("--model", "unet3d", "--num_blocks", "3"), "the number of blocks of --model unet3d cannot"),
    ],
)
def test_a_mistake_is_one_line(run_script: Script, script: str, flags: tuple, message: str, tmp_path: Path) -> None:
    assert message in run_script(f"{FOLDER}/{script}", *flags, WORKSHOP_RESULTS=str(tmp_path)).error
