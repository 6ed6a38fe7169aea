"""What the pages of lesson 03 show is what their experiments print."""

import gzip
import json
from pathlib import Path

import pytest
from matplotlib.image import imread

import ddp_step
from conftest import REPOSITORY, Script
from lab.outputs import FOLDER
from ranks import start_ranks

LESSON = REPOSITORY / "03_ddp"


def shown(name: str) -> str:
    """What the page shows of a command's output."""
    return (FOLDER / f"03_ddp_{name}.txt").read_text().partition("\n")[2]


def test_the_steps_of_a_trace_are_read(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "forward", "ts": 0, "dur": 1000},
        {"ph": "X", "cat": "user_annotation", "name": "backward", "ts": 1000, "dur": 4000},
        {"ph": "X", "cat": "user_annotation", "name": "optimizer", "ts": 5000, "dur": 1000},
        {"ph": "X", "name": "gloo:all_reduce", "ts": 2000, "dur": 1000},
        {"ph": "X", "name": "gloo:all_reduce", "ts": 4500, "dur": 400},
        {"ph": "X", "name": "gloo:all_reduce", "ts": 7000, "dur": 400},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    (step,) = ddp_step.read_steps(tmp_path / "trace.json.gz")
    assert step["backward"] == [(1.0, 5.0)]
    assert step["all-reduces"] == [(2.0, 3.0), (4.5, 4.9)]
    ddp_step.plot([step, step], tmp_path / "step.png")
    assert imread(tmp_path / "step.png").shape[1] == 1100


def test_a_hang_is_seen_by_the_flight_recorder(user_environment: dict[str, str], tmp_path: Path) -> None:
    """It prints what the page shows, with the lines of the source, but for the shorter timeout."""
    flags = ["--timeout", 2, "--out", tmp_path]
    main, other = start_ranks(2, "experiments/flight_recorder.py", *flags, cwd=LESSON, environment=user_environment)
    assert (main.status, other.status) == (0, 0), main.stderr
    assert main.stdout.replace(" 2000ms", " 5000ms") == shown("flight_recorder")
    assert other.stdout == ""


@pytest.mark.parametrize("flags", [["--timeout", 0], []])
def test_a_mistake_with_the_flight_recorder_is_one_line(run_script: Script, tmp_path: Path, flags: list) -> None:
    result = run_script("03_ddp/experiments/flight_recorder.py", *flags, "--out", tmp_path)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --timeout must be above 0" if flags else "error: this needs two ranks")


def test_of_three_ranks_one_reports_that_the_flight_recorder_needs_two(run_script: Script, tmp_path: Path) -> None:
    script, out = "03_ddp/experiments/flight_recorder.py", ("--out", tmp_path)
    first, last = (run_script(script, *out, RANK=rank, WORLD_SIZE="3") for rank in "02")
    assert (first.status, last.status) == (2, 2)
    assert first.stderr.startswith("error: this needs two ranks")
    assert last.stderr == ""


@pytest.mark.parametrize(("name", "flags"), [("unused", []), ("found_unused", ["--find_unused_parameters", "true"])])
def test_an_unused_parameter_is_reported_unless_ddp_looks_for_it(
    name: str, flags: list, user_environment: dict[str, str]
) -> None:
    script = "experiments/unused_parameters.py"
    main, _ = start_ranks(2, script, *flags, cwd=LESSON, environment=user_environment)
    assert main.stdout == shown(name)
