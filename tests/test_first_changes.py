"""What lesson 01's page is made from: the study of its first changes, the slow file system, published profiles."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Script
from lab import first_changes, render_first
from lab.first_changes import CHANGES, Case, load_slow_files


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


MADE_UP = {"IO": 100, "SYNTHETIC": 300, "FULL": 75}


class MadeUpCase:
    """Every trial has another share of the loader."""

    shares: Iterator[int]

    def trial(self) -> dict[str, Any]:
        return profile_of(float(next(self.shares)), 50.0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both studies with made-up measurements."""
    monkeypatch.setattr(MadeUpCase, "shares", itertools.count(1), raising=False)
    monkeypatch.setattr(first_changes, "build_cases", lambda _, flags, __: {case: MadeUpCase() for case in flags})
    monkeypatch.setattr(first_changes, "load_script", lambda _: None)
    monkeypatch.setattr(first_changes, "load_slow_files", lambda: None)
    about = {"hardware": {"cpu": "CPU", "cpus_available": 2}, "versions": {"torch": "1", "python": "1"}}
    about |= {"date": "", "command": ""}
    found = {name: getattr(first_changes, name)() | about for name in ("first_changes", "slow_files")}
    monkeypatch.setattr(render_first, "load", found.__getitem__)
    return found


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
    rows = made_up["first_changes"]["rows"]
    count = len(CHANGES)
    for place, case in enumerate(CHANGES):
        shares = [trial["for_percent"] for trial in rows[case]["trials"]]
        assert shares == [place + 1 + count * number for number in range(1, 1 + first_changes.ROUNDS)]
        assert first_changes.for_share(rows[case]["profile"]) == sorted(shares)[len(shares) // 2]


def test_the_pages_show_the_profiles_and_the_range_of_all_trials(made_up: dict[str, Any]) -> None:
    assert "     0        10      7.0      for inputs, targets in run.batches(loader):" in render_first.profile(
        "CIFAR-10, map"
    )
    assert "took 4 to 10 %, then 5 to 11 % of the time" in render_first.shares("CIFAR-10, map", "CIFAR-10, memory")
    assert "Other work" in render_first.shares("CIFAR-10, map")  # nothing was computed
    made_up["slow_files"]["rows"]["4 workers"]["trials"] = [{"samples_per_second": 150.0, "for_percent": 1.0}] * 3
    assert "| 4 workers | 1 (1 to 1) | 150 (150 to 150) | 3.0 (3.0 to 3.0) |" in render_first.slow_files()


def test_without_overlap_the_times_add_up() -> None:
    assert render_first.together({"IO": {"mean": 100}, "SYNTHETIC": {"mean": 300}}) == (pytest.approx(75), 100)


def test_the_most_that_can_be_gained_follows_from_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [{"for_percent": percent} for percent in (70.0, 75.0, 90.0)]
    monkeypatch.setattr(render_first, "load", lambda _: {"rows": {"CIFAR-10, map": {"trials": trials}}})
    assert render_first.most_to_gain("CIFAR-10, map").endswith("at most 1 / 0.25 = 4.0 times as fast.")


def test_a_ratio_above_what_the_share_allows_is_explained(made_up: dict[str, Any]) -> None:
    rows = made_up["first_changes"]["rows"]
    for name, speed in (("CIFAR-10, map", 100.0), ("CIFAR-10, memory", 400.0)):
        rows[name]["trials"] = [{"samples_per_second": speed, "for_percent": 75.0}] * 3
    assert "| 4.0 (4.0 to 4.0) |" in render_first.loader_gain()
    assert "above" not in render_first.loader_gain()
    rows["CIFAR-10, memory"]["trials"] = [{"samples_per_second": 410.0, "for_percent": 1.0}] * 3
    assert "above the 4.0 of exercise 1" in render_first.loader_gain()


@pytest.mark.parametrize(("mean", "said"), [(103, "no difference"), (130, "faster"), (70, "slower")])
def test_what_lies_within_the_spread_is_not_claimed(mean: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"0 workers": {"mean": 100, "std": 2}}
    alone = {kind: {"mean": MADE_UP[kind]} for kind in ("IO", "SYNTHETIC")}
    monkeypatch.setattr(render_first, "alone", lambda name: alone | {"FULL": full.get(name, {"mean": mean, "std": 2})})
    assert render_first.mnist_gain().count(said) == 2


def test_published_profiles_add_up() -> None:
    shares = [share for _, _, _, share, _ in render_first.PRINCETON_LINES]
    seconds = [seconds for _, _, seconds, _, _ in render_first.PRINCETON_LINES]
    for second, share in zip(seconds, shares, strict=True):
        assert share == pytest.approx(100 * second / 48.428, abs=0.1)  # their total
