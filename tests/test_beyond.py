"""Lesson 05's experiments beyond FSDP2: each layout, pipeline and combination gives the results of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from conftest import REPOSITORY
from lab import render_beyond
from ranks import start_ranks

LESSON = REPOSITORY / "05_fully_sharded"


def results_of(script: str, ranks: int, out: Path, *flags: object) -> dict[str, Any]:
    """Run an experiment as that many ranks, and return what it writes."""
    for result in start_ranks(ranks, f"experiments/{script}", *flags, "--out", out, cwd=LESSON):
        assert result.status == 0, result.stderr
    (file,) = out.glob("*.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_each_layout_of_four_ranks_trains_as_one_process_and_sends_what_the_page_says(tmp_path: Path) -> None:
    results = results_of("tensor_parallel.py", 4, tmp_path)
    counts = {row["name"]: row["step"] for row in results["rows"]}
    blocks = 4
    gathers = {"all_gather": 2 * blocks + 1, "reduce_scatter": blocks + 1}  # the rest of the model stays gathered
    assert counts == {
        "FSDP2 on 4": gathers,
        "TP on 4, PrepareModuleInput": {"all_reduce": 4 * blocks},  # two in forward and two in backward
        "TP on 4": {"all_reduce": 6 * blocks},  # q, k, v each reduce the gradient of their input
        "FSDP2 on 2 x TP on 2, PrepareModuleInput": gathers | {"all_reduce": 4 * blocks},
        "FSDP2 on 2 x TP on 2": gathers | {"all_reduce": 6 * blocks},
        "HSDP: 2 copies, each on 2": gathers | {"all_reduce": blocks + 1},
    }
    for row in results["rows"]:
        assert max(row["loss_difference"], row["weight_difference"]) < 1e-5, row
        copies = 2 if "HSDP" in row["name"] else 1
        # A little more than a part: what is in no divided layer is whole, or has a dimension of 1.
        assert 1 <= row["weights_on_rank0"] * 4 / copies / results["parameters"] < 1.1
    activations = results["batch_size"] * 16 * 64 * 4  # samples, patches, numbers that describe a patch, bytes
    by_name = {row["name"]: row["bytes"] for row in results["rows"]}
    assert by_name["TP on 4"] == {"all_reduce": 6 * blocks * activations}
    assert by_name["FSDP2 on 2 x TP on 2"]["all_reduce"] == 6 * blocks * activations / 2


@pytest.mark.slow
def test_a_pipeline_trains_as_one_process_and_1f1b_stores_less(tmp_path: Path) -> None:
    results = results_of("pipeline.py", 2, tmp_path, "--milliseconds", 4)
    assert len(results["rows"]) == 8
    for row in results["rows"]:
        parts = row["microbatches"]
        assert row["loss_difference"] < 1e-5
        assert row["stored_microbatches"] == ([parts, parts] if row["schedule"] == "GPipe" else [2, 1])
        assert row["predicted_idle_share"] == pytest.approx(1 / (parts + 1))
        assert 0 < row["idle_share"] < 1
        for rank in row["time_line"]:
            assert [kind for kind, _, _ in rank].count("forward") == len(rank) / 2 == parts
            assert all(end - begin > (3.9 if kind == "forward" else 7.9) for kind, begin, end in rank)
    assert imread(tmp_path / "pipeline_2_ranks.png").shape[1] == 1210


STATUSES = {
    "the model, then each block": "fails",
    "validate under torch.inference_mode() first": "fails",
    "a validation under torch.no_grad(), then the optimizer, then training": "differs",
    "the optimizer, then fully_shard": "differs",
    "DDP's model.no_sync()": "fails",
    "tensor parallel, some weights are plain tensors": "fails",
    "tensor parallel and FSDP2, two meshes": "fails",
    "tensor parallel, foreach=True": "fails",
    "tensor parallel, fused=True": "fails",
    "fully_shard, then parallelize_module": "fails",
    "the lesson's block as it is: one layer for q, k and v": "fails",
    "one layer for q, k and v, heads counted on each rank": "differs",
    "with torch.compile(model), model.state_dict()": "fails",
    "then DistributedDataParallel around it": "fails",
    "copy.deepcopy of the sharded model, as for an average of the weights": "fails",
    "GradScaler, a gradient of rank 1 overflows: both ranks must skip the step": "works",
}
"""what comes of combinations that are neither equal, close, nor refused"""


@pytest.mark.thorough
@pytest.mark.slow
def test_combinations_come_out_as_the_page_says(tmp_path: Path) -> None:
    rows = results_of("composition.py", 2, tmp_path, "--quick", "true")["rows"]
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        if row["name"] == "CPUOffloadPolicy(), without a GPU":
            continue  # pins memory, which needs a driver, and some machines without a GPU have one
        usual = {"refused"} if row["name"].startswith("`") else {"equal", "close"}
        assert row["status"] in ({STATUSES[row["name"]]} if row["name"] in STATUSES else usual), row
    checkpointing = [row for row in rows if row["group"] == "activation checkpointing"]
    none, *orders = (row["facts"] for row in checkpointing)
    assert len(orders) == 5 and all(order == orders[0] for order in orders)
    assert orders[0]["kept MB"] < none["kept MB"] / 5
    assert {**orders[0], "kept MB": 0} == {**none, "kept MB": 0}  # as many collectives
    moved = found["the optimizer, then fully_shard"]["facts"]["weights that moved"]
    assert moved == "0%"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tensor_parallel.py", "pipeline.py", "composition.py"])
def test_a_wrong_number_of_ranks_is_refused_in_one_line(script: str, tmp_path: Path) -> None:
    (result,) = start_ranks(1, f"experiments/{script}", "--out", tmp_path, cwd=LESSON)
    assert result.status == 2
    assert result.stderr.count("\n") == 1 and "--nproc-per-node 2" in result.stderr


def test_every_combination_that_was_measured_is_on_the_page() -> None:
    page = (LESSON / "experiments" / "combinations.md").read_text()
    measured = render_beyond.compositions()
    assert measured
    for group in {row["group"] for results in measured for row in results["rows"]}:
        assert page.count(render_beyond.composition(group)) == 1, group
