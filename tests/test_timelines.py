"""The two experiments that plot time lines: saved figures and a panel for each configuration."""

import json
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

import quick_python
from conftest import Script


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(quick_python.commands() / "python"))


@pytest.mark.thorough
@pytest.mark.slow
def test_waiting_for_data_is_part_of_a_step_with_any_number_of_workers(run_script: Script, tmp_path: Path) -> None:
    flags = ("--batch_size", 8, "--rounds", 1, "--out", tmp_path)
    result = run_script("01_single_gpu/experiments/loading_timelines.py", *flags)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "loading_timelines.json").read_text())["rows"]
    assert [row["num_workers"] for row in rows] == [0, 1, 4]
    assert all(0 < row["data_milliseconds"] < row["step_milliseconds"] for row in rows)
    assert "of it waiting for data" in result.stdout
    assert imread(tmp_path / "loading_timelines.png").shape[1] == 1100


@pytest.mark.thorough
@pytest.mark.slow
def test_the_buckets_of_each_configuration_are_counted(run_script: Script, tmp_path: Path) -> None:
    flags = ("--batch_size", 2, "--steps", 14, "--rounds", 1, "--model", "resnet18", "--out", tmp_path)
    result = run_script("03_ddp/experiments/bucket_timelines.py", *flags)
    assert result.status == 0, result.stderr
    rows = json.loads((tmp_path / "bucket_timelines.json").read_text())["rows"]
    assert [row["buckets"] for row in rows] == [1, 3, 11]
    assert all(row["backward_milliseconds"] > 0 for row in rows)
    assert imread(tmp_path / "bucket_timelines.png").shape[1] == 1100


def test_what_stops_a_run_is_reported_in_one_line(run_script: Script, tmp_path: Path) -> None:
    result = run_script(
        "01_single_gpu/experiments/loading_timelines.py", "--rounds", 1, "--model", "unheard_of", "--out", tmp_path
    )
    assert result.status == 2
    assert "unheard_of" in result.stderr
    assert result.stderr.count("\n") == 1
