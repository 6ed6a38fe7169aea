"""Lesson 05 learns what lesson 04 learns, on any number of ranks."""

import json
from pathlib import Path

import pytest

from conftest import Script

SCRIPT = "05_fully_sharded/experiments/same_losses.py"


@pytest.mark.thorough
@pytest.mark.slow
def test_losses_are_those_of_ddp_up_to_rounding(run_script: Script, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--ranks", "2", "--quick", "true", "--out", tmp_path)
    assert result.status == 0, result.stderr
    figures = json.loads((tmp_path / "same_losses.json").read_text())
    rows = figures["rows"]
    assert [(row["method"], row["ranks"]) for row in rows] == [("DDP", 2), ("FSDP2", 2)]
    assert figures["largest_difference"] < 1e-5
    assert len({row["val_accuracy"] for row in rows}) == 1
    assert 2.0 < rows[0]["val_loss"] < 2.4  # it has begun to learn: ten classes alike give 2.303
    assert "FSDP2      2" in result.stdout


@pytest.mark.parametrize("ranks", ["0", "1,,2", "two", "1000"])
def test_a_wrong_number_of_ranks_is_one_line(run_script: Script, ranks: str, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--ranks", ranks, "--out", tmp_path / "out")
    assert result.status == 2
    assert result.stderr == f"error: --ranks takes numbers from 1 to 64 with commas between them, got {ranks}\n"
    assert not (tmp_path / "out").exists()
