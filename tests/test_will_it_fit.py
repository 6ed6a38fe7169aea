"""The forecast of a rank's memory is what real ranks allocate, and the questions about budgets are answered rightly."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memory_model
import step_time
import will_it_fit
from alpha_beta import Network
from conftest import Script
from lab import memory_tables
from memory_model import Setup, estimate, predict
from memory_on_ranks import end_copies_with_collectives
from workshop.errors import UserError

SCRIPT = "05_fully_sharded/experiments/will_it_fit.py"


def small(**values: object) -> Setup:
    return Setup(**({"model": "gpt_small", "batch_size": 4, "ranks": 8, "way": "blocks"} | values))


@pytest.mark.thorough
@pytest.mark.slow
def test_two_real_ranks_allocate_what_was_predicted(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--check", "true", "--out", tmp_path)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "will_it_fit.json").read_text())["rows"]
    found = {(row["way"], row["checkpointing"]): row["ratio"] for row in rows}
    assert found.keys() == {("ddp", False), ("blocks", False), ("keep", False), ("root", False), ("blocks", True)}
    for way in ("ddp", "keep", "root"):
        assert found[way, False] == pytest.approx(1, abs=0.01), found
    for checkpointing in (False, True):  # gloo copies what it gathers
        assert 0.99 < found["blocks", checkpointing] < 1.08, found


def test_the_ways_differ_as_the_page_says() -> None:
    def small(**values: object) -> Setup:
        return Setup(**({"model": "gpt_small", "batch_size": 4, "ranks": 8, "way": "blocks", "depth": 4} | values))

    alone = predict(small(way="alone", ranks=1))
    ddp = predict(small(way="ddp"))
    assert ddp.peak - alone.peak == 4 * alone.parameters, "the buckets"
    assert ddp.peak > 16 * ddp.parameters
    peaks = {way: predict(small(way=way)).peak for way in ("blocks", "keep", "root")}
    assert peaks["blocks"] < peaks["keep"] < peaks["root"] < ddp.peak
    assert predict(small(checkpointing=True)).peak < peaks["blocks"]
    many = predict(small(ranks=32))
    assert many.peak > peaks["blocks"] / 4, "activations are not sharded"
    assert predict(small(ranks=32, replicas=4)).peak == pytest.approx(peaks["blocks"], rel=0.01), "HSDP"
    assert sum(many.parts.values()) == many.peak


def test_the_script_prints_the_tables_of_the_pages(run_script: Script, tmp_path: Path) -> None:
    flags = ("--num_blocks", 1, "--ranks", 2, "--ways", "ddp,blocks", "--checkpointing", "false", "--out", tmp_path)
    result = run_script(SCRIPT, *flags)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "will_it_fit.json").read_text())["rows"]
    printed = [line.split() for line in result.stdout.splitlines()]
    for header, cells in (memory_tables.forecast(rows), memory_tables.times(rows)):
        for row in (header, *cells):
            assert " ".join(row).split() in printed
    _, cells = memory_tables.forecast(rows)
    for _, *parts, peak, moment in cells:
        assert sum(map(float, parts)) == pytest.approx(float(peak), abs=0.31)
        assert moment in ("forward", "backward", "optimizer")


def test_parts_of_a_batch_store_fewer_activations() -> None:
    whole, parts = (predict(small(way="alone", ranks=1, depth=4, batch_size=8, parts=number)) for number in (1, 4))
    assert parts.parts["activations"] < 0.5 * whole.parts["activations"]
    assert parts.peak < whole.peak


@pytest.mark.parametrize(("ranks", "moment"), [(8, "backward"), (2, "optimizer")])
def test_a_deep_model_follows_from_shallow_ones(ranks: int, moment: str) -> None:
    setup = small(depth=20, checkpointing=True, ranks=ranks)
    deep, shallow = predict(setup), predict(replace(setup, depth=8))
    assert (shallow.moment, deep.moment) == ("backward", moment)
    assert estimate(setup) == pytest.approx(deep.peak, rel=0.001)


def test_the_highest_stage_of_a_step_is_its_peak() -> None:
    for setup in (small(depth=2), small(depth=2, way="ddp", ranks=1)):
        found = predict(setup)
        assert len(found.peaks) == 4
        assert max(found.peaks.values()) == found.peak


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 10 + 3 * n,
        lambda n: max(50, n * 7),
        lambda n: max(20 + n, 3 * n - 10),
        lambda n: 99 if n < 40 else 200,
    ],
)
def test_the_largest_number_within_a_budget(peak: Callable[[int], float]) -> None:
    expected = max(n for n in range(1, 200) if peak(n) <= 100)
    assert will_it_fit.largest(peak, 100) == expected
    assert will_it_fit.largest(peak, peak(1) - 1) == 0


@pytest.mark.slow
def test_budgets(run_script: Script, tmp_path: Path) -> None:
    flags = (
        "--model",
        "gpt_small",
        "--num_blocks",
        "2",
        "--ways",
        "blocks",
        "--checkpointing",
        "false",
        "--reserve_gb",
        "0.01",
    )
    result = run_script(SCRIPT, *flags, "--budget_gb", "0.06", "--ranks", "4", "--out", tmp_path)
    assert result.status == 0, result.stderr
    (row,) = json.loads((tmp_path / "will_it_fit.json").read_text())["rows"]
    base = {"way": "blocks", "precision": "bf16"}
    for name, field in (("fewest_ranks", "ranks"), ("largest_batch", "batch_size"), ("most_blocks", "depth")):
        values = base | {"ranks": 4, "batch_size": 1, "depth": 2} | {field: row[name]["number"]}
        assert row[name]["peak"] == predict(small(**values)).peak <= 0.05e9
    batch = row["largest_batch"]["number"]
    assert predict(small(**base, ranks=4, depth=2, batch_size=batch + 1)).peak > 0.05e9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ranks", "0"), "--ranks: takes positive numbers, separated by commas, got '0'"),
        (("--model", "vot"), "no model 'vot'; did you mean vit?"),
        (("--model", "mnist_cnn"), "--model mnist_cnn has no blocks"),
        (("--model", "unet3d", "--num_blocks", "3"), "the number of blocks of --model unet3d cannot be changed"),
        (("--ranks", "8", "--replicas", "3"), "8 ranks cannot form 3 groups of equal size"),
        (("--ways", "zero"), "does not know 'zero'; known are: blocks, ddp, keep, root"),
        (("--tflops", "fast"), "--tflops takes a positive number, or the word measure, got 'fast'"),
        (
            ("--budget_gb", "2.0001", "--model", "gpt_small", "--num_blocks", "1", "--ways", "blocks"),
            "no number of ranks up to 1,024 is enough for --model gpt_small",
        ),
    ],
)
def test_mistakes_are_one_line(run_script: Script, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    result = run_script(SCRIPT, *flags, "--out", tmp_path)
    assert result.status == 2
    lines = [line for line in result.stderr.splitlines() if line.strip(".")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr


@pytest.fixture
def older_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.fsdp2_mem_tracker", None)
    memory_model.private_tools.cache_clear()
    yield
    memory_model.private_tools.cache_clear()


@pytest.mark.usefixtures("older_torch")
def test_a_torch_without_the_private_parts_is_named() -> None:
    with pytest.raises(UserError, match=re.escape(f"torch {torch.__version__} lacks a private part")):
        predict(small())


def test_bytes_and_operations_of_a_step() -> None:
    setup = small(ranks=4)
    inside, outside = step_time.parameter_counts("gpt_small", 0)
    per_byte = Network(alpha=0.0, beta=1.0)
    share = 3 / 4  # of what is gathered, a rank gets this part from others
    gathered = share * 4 * (2 * inside + outside)
    reduced = share * 4 * (inside + outside)
    assert step_time.communication_seconds(setup, per_byte) == pytest.approx(gathered + reduced)
    keep = step_time.communication_seconds(small(ranks=4, way="keep"), per_byte)
    ddp = step_time.communication_seconds(small(ranks=4, way="ddp"), per_byte)
    assert keep == pytest.approx(ddp) == 2 * reduced
    messages = Network(alpha=1.0, beta=0.0)
    assert step_time.communication_seconds(small(ranks=4, way="root"), messages) == 2 * 3
    assert step_time.communication_seconds(setup, messages) == 3 * (9 + 9 + 8)
    flops = step_time.flops_of_step(setup)
    tokens = 4 * 64
    assert flops > 6 * inside * tokens * 0.98, "a multiplication and an addition per weight, three times"
    assert flops < 1.5 * 6 * (inside + outside) * tokens
    assert flops < step_time.flops_of_step(small(checkpointing=True)) < 4 / 3 * flops
    bounds = step_time.step_bounds(setup, 1e-12, per_byte)
    assert bounds["full overlap"] == max(bounds["compute"], bounds["communication"]) < bounds["no overlap"]


def test_copies_of_gloo_end_with_the_collective() -> None:
    def memory(time: float, count: int, address: int) -> dict:
        return {"name": "[memory]", "ts": time, "args": {"Bytes": count, "Addr": address}}

    call = {"name": "collective", "ts": 10.0, "dur": 5.0}
    events = [memory(5, 100, 1), call, memory(11, 40, 2), memory(12, 30, 3), memory(13, -30, 3), memory(30, 7, 4)]
    found = [(event["ts"], event["args"]["Bytes"]) for event in end_copies_with_collectives(events) if "args" in event]
    assert found == [(5, 100), (11, 40), (12, 30), (13, -30), (15.0, -40), (30, 7)]
    late = [*events[:3], memory(20, -40, 2), memory(21, 9, 2), memory(22, -9, 2)]
    found = [(event["ts"], event["args"]["Bytes"]) for event in end_copies_with_collectives(late) if "args" in event]
    assert found == [(5, 100), (11, 40), (15.0, -40), (21, 9), (22, -9)]
