"""The doctor in daily use: accepted findings, exit status, other formats, and its fixtures of pytest."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from doctor_events import correct_run
from rankdoctor import cli, series
from rankdoctor.accepted import BaselineError, accept, read_baseline
from rankdoctor.checks import Diagnosis, Finding
from rankdoctor.formats import github, sarif
from rankdoctor.launch import Plan

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    """Two findings in a script of three lines."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("one()\ntwo()  # rankdoctor: ignore[one_writer, no_such_check]\nthree()\n")
    it = Diagnosis()
    it.findings = [
        Finding("FAULT", f"{script}:2", "2 ranks write the same file", "let rank 0 write", "one_writer"),
        Finding("NOTE", f"{script}:3", "12 of 40 updates\nare 100 % wrong", "change it", "sample_weights"),
    ]
    return it


def test_a_comment_accepts_what_it_names(diagnosis: Diagnosis, tmp_path: Path) -> None:
    accepted = accept(diagnosis, str(tmp_path))
    assert [finding.check for finding in diagnosis.findings] == ["sample_weights"]
    assert accepted.by_comment == 1
    (unknown,) = accepted.unknown
    assert unknown.endswith("train.py:2 names no_such_check")


def test_a_baseline_accepts_what_it_has_also_with_other_numbers_and_lines(diagnosis: Diagnosis, tmp_path: Path) -> None:
    file, note = tmp_path / "baseline.json", diagnosis.findings[1]
    assert accept(diagnosis, str(tmp_path), str(file)).by_baseline == 1
    script = tmp_path / "train.py"
    other = tmp_path / "moved" / "train.py"
    other.parent.mkdir()
    other.write_text("new()\n" + script.read_text())
    later = Finding("NOTE", f"{other}:4", note.text.replace("12", "13"), note.fix, note.check)
    new = Finding("FAULT", f"{other}:1", "it hangs", "let all ranks come", "hang")
    diagnosis.findings = [later, new]
    assert accept(diagnosis, str(other.parent), str(file)).by_baseline == 1
    assert diagnosis.findings == [new]


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "is no baseline"), ('{"format": 0, "findings": []}', "another version")]
)
def test_a_baseline_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(BaselineError, match=said):
        read_baseline(file)


def test_annotations_of_github(diagnosis: Diagnosis) -> None:
    first, second = github(diagnosis)
    assert first == (
        "::error file=train.py,line=2,title=rankdoctor one_writer::2 ranks write the same file. Fix: let rank 0 write."
    )
    assert second.startswith("::warning file=train.py,line=3,") and "updates%0Aare 100 %25 wrong" in second


def test_sarif(diagnosis: Diagnosis) -> None:
    log = json.loads(sarif(diagnosis))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "rankdoctor"
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == {"one_writer", "sample_weights"} <= rules
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 2}}


@pytest.mark.slow
def test_fail_on_and_the_formats_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SCRIPTS)
    assert cli.main(["--keep", str(tmp_path / "runs"), "ddp.py", "item"]) == 0  # a COST alone
    capsys.readouterr()
    again = ["--reread", str(tmp_path / "runs")]
    assert cli.main([*again, "--fail-on", "cost"]) == 1
    assert "COST" in capsys.readouterr().out
    assert cli.main([*again, "--format", "github"]) == 0
    assert capsys.readouterr().out.startswith("::notice file=ddp.py,line=")
    assert cli.main([*again, "--baseline", str(tmp_path / "known.json"), "--fail-on", "cost"]) == 0
    assert "1 by the baseline" in capsys.readouterr().out
    assert cli.main([*again, "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert re.search(r"\n  Every rank trains on samples of its own\. \([\d,]+ samples of all ranks", verbose)
    assert "\033" not in verbose


def test_thorough_leaves_out_what_can_change_nothing() -> None:
    options, plan = cli.parser().parse_args(["--thorough", "train.py"]), Plan(Path("train.py"), [])
    run = correct_run()
    assert len(list(series.provocations(options, plan, run))) == 6
    assert series.left_out(options, run) == []
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("loader", "save", "write")]
    assert [one.name for one in series.provocations(options, plan, run)] == [
        "as on two nodes",
        "with a NaN on rank 1",
        "with outliers on rank 1",
        "on one rank",
    ]
    assert len(series.left_out(options, run)) == 2


@pytest.mark.thorough
def test_its_fixtures_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "one_process.py").read_text())
    (tmp_path / "idle.py").write_text("print('nothing to do')\n")
    (tmp_path / "sums.py").write_text(
        "import torch\nimport torch.distributed as dist\n\n\ndef of_ranks(start):\n"
        "    value = torch.tensor(start + dist.get_rank())\n    dist.all_reduce(value)\n    return value.item()\n"
    )
    (tmp_path / "test_it.py").write_text(
        "from sums import of_ranks\n\n\n"
        "def test_training(rankdoctor):\n    assert 'FAULT' not in rankdoctor('train.py')\n\n\n"
        "def test_idle(rankdoctor):\n    rankdoctor('idle.py', seconds=60)\n\n\n"
        "def test_sum(on_ranks):\n    assert on_ranks(of_ranks, 5) == [11, 11]\n"
        "    assert on_ranks(of_ranks, 1, ranks=1) == [1]\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "FAILED test_it.py::test_idle" in done.stdout and "No update of weights was seen" in done.stdout
