"""Shards against single files: the same samples, both from disk."""

import json
from pathlib import Path

from conftest import Script
from sources import generate, pack
from workshop.datasets.shards import SHARDS


def test_reads_the_same_samples_both_ways(run_script: Script, tmp_path: Path) -> None:
    generate("mnist", tmp_path, train_samples=640, val_samples=64)
    pack("mnist", tmp_path)
    result = run_script(
        "01_single_gpu/experiments/sequential_reads.py", "--data_dir", tmp_path, "--out", tmp_path / "out"
    )
    assert result.status == 0, result.stderr
    results = json.loads((tmp_path / "out" / "sequential_reads.json").read_text())
    in_shards, in_files = results["rows"]
    assert in_shards["samples"] == in_files["samples"] == 640 * in_shards["files"] // SHARDS
    assert in_files["files"] == 2 * in_files["samples"]
    assert results["ratio"] == in_files["seconds"] / in_shards["seconds"]
    assert f"{results['ratio']:.1f} times as fast" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["MNIST", "out", "shards"]


def test_without_shards_it_says_how_to_get_them(run_script: Script, tmp_path: Path) -> None:
    result = run_script(
        "01_single_gpu/experiments/sequential_reads.py", "--data_dir", tmp_path, "--out", tmp_path / "out"
    )
    assert (result.status, len(result.stderr.splitlines())) == (2, 1)
    assert "python ../data/prepare.py mnist --shards" in result.stderr
