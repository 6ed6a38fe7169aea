"""How many seeds reach the target: each configuration trains with the seeds it should, and is counted rightly."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lab.launching
from conftest import Script
from success_rate import cpu_seconds

SCRIPT = "04_mixed_precision/experiments/success_rate.py"
TINY = ["--limit_train", 128, "--limit_val", 50]
Train = Callable[[Path, list[str]], dict[str, Any]]


@pytest.fixture
def measure(run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the experiment with a stand-in for starting train.py; returns the table's lines and the results file."""
    monkeypatch.setattr("lab.timing.cpu_share", lambda: 0.5)

    def run(train: Train, *flags: object, emulated: bool = False) -> tuple[list[str], dict[str, Any]]:
        def start(command: list[object], folder: Path, **_: object) -> dict[str, Any]:
            assert command[:2] == [sys.executable, "train.py"]
            return train(folder, [str(word) for word in command[2:]])

        monkeypatch.setattr(lab.launching, "run_and_read", start)
        monkeypatch.setattr("workshop.hardware.emulates", lambda *_: emulated)
        result = run_script(SCRIPT, *flags, "--out", tmp_path)
        assert result.status == 0, result.stderr
        return result.stdout.splitlines(), json.loads((tmp_path / "success_rate.json").read_text())

    return run


def as_if_trained(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Seed 3 misses the target with mnist_fast.yaml, and every seed does with dropout."""
    seed, fast = int(flags[flags.index("--seed") + 1]), "../configs/mnist_fast.yaml" in flags
    assert folder.name == ("04_mixed_precision" if fast else "01_single_gpu")
    misses = fast and (seed == 3 or "--dropout" in flags)
    return {"epochs": [{"val_accuracy": 0.9799 if misses else 0.98, "seconds": 2.0, "samples_per_second": 10.0 * seed}]}


def test_a_seed_that_misses_the_target_is_counted(measure: Callable[..., Any]) -> None:
    lines, results = measure(as_if_trained, "--seeds", 4, "--first_seed", 2, "--seeds_of_others", 2)
    rows = {row["name"]: row["runs"] for row in results["rows"]}
    assert {name: [run["seed"] for run in runs] for name, runs in rows.items()} == {
        "standard": [2, 4],
        "fast": [2, 3, 4, 5],
        "dropout": [2, 4],
        "fp32": [2, 4],
    }
    table = [line for line in lines if " of " in line and "%" in line]
    assert [line.split()[:4] for line in table[1:5]] == [
        ["standard", "2", "of", "2"],
        ["fast", "3", "of", "4"],
        ["dropout", "0", "of", "2"],
        ["fp32", "2", "of", "2"],
    ]
    assert any(line.startswith("=> 3 of 4 seeds reached 98%, in ") for line in lines)
    assert rows["fast"][1]["val_accuracy"] == 0.9799 and rows["fast"][3]["samples_per_second"] == 50
    assert (results["target"], results["cpu_share"]) == (0.98, 0.5)


def test_where_bf16_is_emulated_all_compute_in_fp32(measure: Callable[..., Any]) -> None:
    _, results = measure(as_if_trained, "--seeds", 1, emulated=True)
    precision = ["--precision", "fp32"]
    assert {row["name"]: row["flags"][-2:] == precision or precision[0] in row["flags"] for row in results["rows"]} == {
        "standard": False,
        "fast": True,
        "dropout": True,
    }


def test_each_configuration_really_trains(measure: Callable[..., Any], run_script: Script, tmp_path: Path) -> None:
    configs = []

    def train(folder: Path, flags: list[str]) -> dict[str, Any]:
        result = run_script(f"{folder.name}/train.py", *flags, "--num_workers", 0, "--run_dir", tmp_path / "run")
        assert result.status == 0, result.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        configs.append(summary["config"])
        return summary

    _, results = measure(train, "--seeds", 1, "--first_seed", 7, *TINY)
    standard, fast, dropout, fp32 = configs
    assert [config["seed"] for config in configs] == [7] * 4
    assert (standard["dropout"], fast["dropout"], dropout["dropout"]) == (True, False, True)
    assert (fast["precision"], fp32["precision"]) == ("bf16", "fp32")
    assert dropout | {"dropout": False} == fp32 | {"precision": "bf16"} == fast
    for row in results["rows"]:
        (run,) = row["runs"]
        assert 0 <= run["val_accuracy"] <= 1 and 0 < run["training_seconds"] < run["process_seconds"]


def test_cpu_seconds_are_those_of_processes_that_ended() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True)
    assert cpu_seconds() - before >= 0.2


def test_the_seed_is_no_flag(run_script: Script) -> None:
    result = run_script(SCRIPT, "--seed", 3)
    message = "error: --seed is what this experiment varies; choose them with --first_seed and --seeds\n"
    assert (result.status, result.stderr) == (2, message)
