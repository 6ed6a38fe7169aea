"""What lesson 01's page is made from: the study of its first changes, the slow file system, published profiles."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Script
from lab import first_changes, render_first
from lab.first_changes import BENCHMARKED, CASES, Case, load_slow_files


@pytest.mark.slow
def test_each_sample_of_the_slow_file_system_arrives_late(run_script: Script, tmp_path: Path) -> None:
    flags = ("--num_workers", 0, "--limit_train", 320, "--limit_val", 8, "--log_interval", 5, "--run_dir", tmp_path)
    result = run_script("01_single_gpu/experiments/slow_files.py", *flags)
    assert result.status == 0, result.stderr
    (load,) = re.findall(r"load ([\d.]+) ms", result.stdout)
    assert float(load) >= 64 * 2


def profile_of(percent: float, samples_per_second: float) -> dict[str, Any]:
    texts = {"    for inputs, targets in run.batches(loader):": percent, "        loss.backward()": 100 - percent}
    lines = [
        {"line": number, "hits": 10, "seconds": share / 100, "percent": share, "text": text}
        for number, (text, share) in enumerate(texts.items())
    ]
    return {"samples_per_second": samples_per_second, "lines": lines}


class MadeUpCase:
    """IO is 100 samples/s, SYNTHETIC 300, and in FULL the times add up exactly; every trial has another share."""

    shares: Iterator[int]

    def trial(self) -> dict[str, Any]:
        return profile_of(float(next(self.shares)), 50.0)

    def throughputs(self) -> dict[str, list[float]]:
        return {"IO": [100.0] * 3, "SYNTHETIC": [300.0] * 3, "FULL": [75.0] * 3}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The study with made-up measurements."""
    monkeypatch.setattr(MadeUpCase, "shares", itertools.count(1), raising=False)
    monkeypatch.setattr(first_changes, "build_cases", lambda _: {case: MadeUpCase() for case in CASES})
    monkeypatch.setattr(first_changes, "log_of", lambda _: ["a line"])
    monkeypatch.setattr(first_changes, "python_functions", lambda _: [])
    measured = first_changes.first_changes()
    about = {"hardware": {"cpu": "CPU", "cpus_available": 2}, "versions": {"torch": "1", "python": "1"}}
    monkeypatch.setattr(render_first, "load", lambda _: measured | about | {"date": "", "command": ""})
    return measured["rows"]


@pytest.mark.slow
def test_a_case_trains_as_the_lesson_does(tmp_path: Path, data_dir: Path) -> None:
    flags = ("--data_dir", data_dir, "--limit_train", 256, "--limit_val", 8, "--num_workers", 0)
    case = Case.build(load_slow_files(), flags, tmp_path)
    found = case.trial()
    waited = next(line["seconds"] for line in found["lines"] if "for inputs" in line["text"])
    assert waited >= 256 * 0.002
    assert any(line["text"].strip() == "loss.backward()" and line["hits"] == 4 for line in found["lines"])
    assert found["samples_per_second"] < 500
    assert first_changes.for_share(found) > 0


def test_trials_of_all_configurations_are_run_in_turn(made_up: dict[str, Any]) -> None:
    count = len(CASES)
    for place, case in enumerate(CASES):
        shares = [trial["for_percent"] for trial in made_up[case]["trials"]]
        assert shares == [place + 1 + count * number for number in range(1, 1 + first_changes.ROUNDS)]
        assert first_changes.for_share(made_up[case]["profile"]) == sorted(shares)[len(shares) // 2]
    assert {case for case in CASES if "IO" in made_up[case]} == set(BENCHMARKED)


def test_without_overlap_the_times_add_up(made_up: dict[str, Any]) -> None:
    assert render_first.together(made_up["CIFAR-10, map"]) == (pytest.approx(75), 100)
    row = render_first.predictions({"CIFAR-10, map": "a"}).splitlines()[2]
    assert row == "| a | 100 ± 0 | 300 ± 0 | 75 | 100 | 75 ± 0 |"


def test_the_most_that_can_be_gained_follows_from_the_share(made_up: dict[str, Any]) -> None:
    made_up["CIFAR-10, map"]["profile"] = profile_of(75, 1)
    assert render_first.most_to_gain("CIFAR-10, map").endswith("at most 1 / (1 - 0.75) = 4.0 times as fast.")


@pytest.mark.parametrize(
    ("speeds", "said"),
    [([99, 101, 103], "no difference"), ([102, 103, 104], "gains a little"), ([90, 95, 99], "loses a little")],
)
def test_what_lies_within_the_spread_is_not_claimed(made_up: dict[str, Any], speeds: list[int], said: str) -> None:
    for case in CASES:
        made_up[case]["trials"] = [{"samples_per_second": 100.0, "for_percent": 1.0}] * 3
    for case in ("MNIST, 2 workers", "MNIST, memory"):
        made_up[case]["trials"] = [{"samples_per_second": float(speed), "for_percent": 1.0} for speed in speeds]
    assert render_first.mnist_conclusion().count(said) == 2


def test_published_profiles_add_up() -> None:
    shares = [share for _, _, _, share, _ in render_first.PRINCETON_LINES]
    seconds = [seconds for _, _, seconds, _, _ in render_first.PRINCETON_LINES]
    for second, share in zip(seconds, shares, strict=True):
        assert share == pytest.approx(100 * second / 48.428, abs=0.1)  # their total
