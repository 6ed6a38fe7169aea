"""The table of what fills the memory adds up, and names the cure that fits."""

import json
from pathlib import Path

import pytest

from conftest import Script
from lab import memory_tables

SCRIPT = "05_fully_sharded/experiments/what_fills_memory.py"


def test_the_table_adds_up_and_names_the_cure(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--model", "unet3d", "--batch_size", "1,16,64", "--out", tmp_path)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "what_fills_memory.json").read_text())["rows"]
    for row in rows:
        assert sum(row["parts"].values()) == row["peak"] >= 16 * row["parameters"]
        assert row["parts"]["parameters"] == 4 * row["parameters"]
        assert row["parts"]["optimizer state"] == 8 * row["parameters"]
    one, sixteen, many = rows
    assert many["parts"]["activations"] == pytest.approx(4 * sixteen["parts"]["activations"], rel=0.01)
    assert (one["moment"], many["moment"]) == ("optimizer", "backward")
    assert [memory_tables.advice(row["peak"], row["cures"]) for row in (one, many)] == ["shard", "split the batch"]
    assert many["cures"][memory_tables.RECOMPUTED] == many["peak"], "a block of the U-Net is a single convolution"
    assert one["cures"][memory_tables.PARTS] is None
    assert one["cures"][memory_tables.SHARDED] < one["peak"] / 3
    for header, cells in (memory_tables.what_fills(rows), memory_tables.what_helps(rows)):
        printed = [line.split() for line in result.stdout.splitlines()]
        for row in (header, *cells):
            assert " ".join(row).split() in printed
    assert "26%" in result.stdout
    fused = run_script(SCRIPT, "--model", "unet3d", "--batch_size", "1", "--update", "fused", "--out", tmp_path)
    assert fused.status == 0, fused.stderr
    (row,) = json.loads((tmp_path / "what_fills_memory.json").read_text())["rows"]
    assert one["state_share"] < 0.81 < 0.96 < row["state_share"], "all tensors together need temporaries for all"


def test_mistakes_are_one_line(run_script: Script, tmp_path: Path) -> None:
    for flags, message in (
        (("--model", "unet"), "does not know 'unet'; did you mean unet3d?"),
        (("--batch_size", "1,x"), "--batch_size: takes positive numbers, separated by commas, got '1,x'"),
        (("--model", "mnist_cnn", "--activation_checkpointing", "true"), "--model mnist_cnn has no blocks"),
    ):
        result = run_script(SCRIPT, *flags, "--out", tmp_path)
        assert result.status == 2
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr
