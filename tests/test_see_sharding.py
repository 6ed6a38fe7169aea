"""The experiments of lesson 05 on two CPU ranks: what they count is what the page says."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quick_python
from conftest import REPOSITORY, Script
from ranks import start_ranks

LESSON = REPOSITORY / "05_fully_sharded"
EXPERIMENTS = LESSON / "experiments"


@pytest.fixture(scope="module")
def facts() -> dict:
    """What two ranks measure, in one process group for all experiments."""
    script = REPOSITORY / "tests" / "sharding_facts.py"
    main, other = start_ranks(2, script, cwd=LESSON)
    assert main.status == other.status == 0, main.stderr + other.stderr
    return json.loads(main.stdout.splitlines()[-1])


def collectives(row: dict) -> tuple[int, int]:
    return row["collectives"]["all-gathers"], row["collectives"]["reduce-scatters"]


@pytest.mark.slow
def test_each_rank_stores_half_of_a_weight(facts: dict) -> None:
    for rank, of_rank in enumerate(facts["one_step"]["stored"]):
        weight = of_rank["--shard blocks"]
        assert of_rank["DDP"]["local_shape"] == weight["shape"] == [256, 64]
        assert weight | {"placements": ""} == {
            "rank": rank,
            "type": "DTensor",
            "shape": [256, 64],
            "placements": "",
            "local_shape": [128, 64],
        }
        assert "Shard(dim=0)" in weight["placements"]


@pytest.mark.slow
def test_collectives_of_one_step(facts: dict) -> None:
    ddp, *sharded = facts["one_step"]["rows"]
    assert ddp["collectives"]["all-reduces"] >= 1
    assert [collectives(row) for row in sharded] == [(9, 5), (5, 5), (1, 1)]  # four blocks, and the rest
    assert all(row["collectives"]["all-reduces"] == 0 for row in sharded)


@pytest.mark.slow
def test_sharding_changes_memory_but_not_the_losses(facts: dict) -> None:
    ddp, blocks, keep, root = facts["one_step"]["rows"]
    assert ddp["losses"][0] != ddp["losses"][1]
    for row in (blocks, keep, root):
        assert row["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert row["stored_bytes"] == pytest.approx(ddp["stored_bytes"] / 2, rel=0.05)
    assert blocks["peak_bytes"] < keep["peak_bytes"] < root["peak_bytes"]


@pytest.mark.slow
def test_collectives_of_accumulation_and_equal_gradients(facts: dict) -> None:
    rows = facts["accumulation"]["rows"]
    assert [collectives(row) for row in rows] == [(13, 7), (52, 28), (52, 7), (31, 7)]
    assert all(row["gradient_difference"] < 1e-5 for row in rows)
    whole, each, last, _ = (row["peak_bytes"] for row in rows)
    assert each < last < whole


def test_nine_samples_are_accumulated_in_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from accumulation import backward_in_parts

    model = nn.Linear(4, 10)
    inputs, targets = torch.randn(9, 4), torch.arange(9)
    F.cross_entropy(model(inputs), targets).backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    synchronized: list[bool] = []
    model.set_requires_gradient_sync = synchronized.append
    model.set_reshard_after_backward = lambda _: None
    backward_in_parts(model, (inputs, targets), parts=4)
    assert synchronized == [False, False, False, True]
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.slow
def test_a_step_changes_few_weights_in_bf16(facts: dict) -> None:
    changed = {(row["stored"], row["lr"]): row["changed"] for row in facts["small_updates"]["rows"]}
    assert all(share > 0.99 for (stored, _), share in changed.items() if stored == "float32")
    assert 0.2 < changed["bfloat16", 1e-4] < 0.7
    assert changed["bfloat16", 1e-5] < 0.15


@pytest.mark.slow
def test_equal_seeds_give_equal_parts(facts: dict) -> None:
    same, by_rank, train_py = facts["meta_device"]["rows"]
    assert (same["rows"], same["distinct"]) == (64, 32)
    assert by_rank["distinct"] == train_py["distinct"] == 64


def test_checkpoints_around_blocks_save_memory_and_around_layers_nothing(run_script: Script, tmp_path: Path) -> None:
    flags = ("--vit_width", 32, "--vit_depth", 4, "--vit_patch", 4, "--batch_size", 4, "--out", tmp_path)
    result = run_script("05_fully_sharded/experiments/recompute.py", *flags)
    assert result.status == 0, result.stderr
    none, block, second, layer = json.loads((tmp_path / "recompute.json").read_text())["rows"]
    assert block["kept_bytes"] < 0.2 * none["kept_bytes"] < second["kept_bytes"] < none["kept_bytes"]
    assert layer["kept_bytes"] == pytest.approx(none["kept_bytes"], rel=0.02)
    assert block["peak_bytes"] < second["peak_bytes"] < none["peak_bytes"]
    assert layer["peak_bytes"] > 0.98 * none["peak_bytes"]
    assert none["flops"] == layer["flops"]
    assert 1.1 < block["flops"] / none["flops"] < 1.34
    assert all(row["gradient_norm"] == pytest.approx(none["gradient_norm"], rel=1e-5) for row in (block, second, layer))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_ddp_runs_out_of_memory_where_sharded_state_fits(run_script: Script, tmp_path: Path) -> None:
    result = run_script("05_fully_sharded/experiments/limited_memory.py", "--quick", "true", "--out", tmp_path)
    assert result.status == 0, result.stderr
    ddp, sharded = json.loads((tmp_path / "limited_memory.json").read_text())["rows"]
    assert "DefaultCPUAllocator: can't allocate memory" in ddp["message"]
    assert len(sharded["peak_bytes"]) == 2
    assert all(0 < peak < 450e6 for peak in sharded["peak_bytes"])


@pytest.mark.slow
def test_the_time_line_has_all_collectives_of_a_step(
    run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(quick_python.commands() / "python"))
    flags = ("--vit_width", 32, "--vit_depth", 3, "--batch_size", 4, "--out", tmp_path)
    result = run_script("05_fully_sharded/experiments/step_timeline.py", *flags)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "step_timeline.json").read_text())["rows"]
    assert [(row["all_gathers"], row["reduce_scatters"]) for row in rows] == [(7, 4), (7, 4)]
    assert (tmp_path / "step_timeline.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("script", "flags", "mistake"),
    [
        ("limited_memory.py", ("--budget_mb", 20), "less than the libraries need"),
        ("limited_memory.py", ("--vit_width", 510), "--vit_width 510 is not a multiple of 4"),
        ("limited_train.py", ("03_ddp", 450), "give 04_mixed_precision or 05_fully_sharded"),
        ("limited_train.py", ("05_fully_sharded", 450), "set MALLOC_ARENA_MAX=1"),
        ("recompute.py", ("--vit_patch", 5), "--vit_patch 5 does not divide 28"),
        ("accumulation.py", ("--batch_size", 2), "--batch_size 2 has no 4 parts"),
        ("meta_device.py", ("--vit_width", 30), "--vit_width 30 is not a multiple of 4"),
        ("one_step.py", ("--vit_width", 30), "--vit_width 30 is not a multiple of 4"),
    ],
)
def test_a_mistake_is_one_line(run_script: Script, script: str, flags: tuple, mistake: str, tmp_path: Path) -> None:
    result = run_script(f"05_fully_sharded/experiments/{script}", *flags, WORKSHOP_RUNS=str(tmp_path))
    assert result.status == 2
    assert mistake in result.stderr
    assert result.stderr.count("\n") == 1
