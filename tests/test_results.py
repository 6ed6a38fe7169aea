"""The results file of an experiment says what it was measured with, unless the figures say that themselves."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lab.results import write_results

CPU = torch.device("cpu")


def test_figures_are_written_with_what_is_needed_to_repeat_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/allreduce.py", "--max_mib", "1"])
    write_results(tmp_path / "a.json", CPU, {"rows": [1]})
    found = json.loads((tmp_path / "a.json").read_text())
    assert list(found) == ["date", "command", "hardware", "versions", "rows"]
    assert found["command"] == "python allreduce.py --max_mib 1"
    assert (found["hardware"]["device"], found["versions"]["torch"]) == ("cpu", version("torch"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_what_the_figures_say_of_another_run_is_kept(tmp_path: Path) -> None:
    write_results(tmp_path / "a.json", CPU, {"hardware": {"device": "cuda"}})
    assert json.loads((tmp_path / "a.json").read_text())["hardware"] == {"device": "cuda"}
