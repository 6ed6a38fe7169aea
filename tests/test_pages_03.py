"""What the pages of lesson 03 show: output that was kept, the job file explained, plots that follow from figures."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

import ddp_step
from conftest import REPOSITORY, Script
from lab import render_ddp
from lab.example_output import COMMANDS, FOLDER
from lab.render import load
from ranks import start_ranks

PAGES = [REPOSITORY / "03_ddp" / "README.md", *(REPOSITORY / "03_ddp" / "experiments").glob("*.md")]


def shown(name: str) -> str:
    """What the page shows of a command's output."""
    return render_ddp.output(name).removeprefix("```text\n").removesuffix("```")


@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_shown_below_its_command(name: str) -> None:
    """Each command that was run for the pages stands on one of them, with what it printed."""
    text = (FOLDER / f"03_ddp_{name}.txt").read_text()
    assert text.startswith(f"$ {COMMANDS[name]}\n")
    (page,) = [page.read_text() for page in PAGES if render_ddp.output(name) in page.read_text()]
    assert f"\n{COMMANDS[name]}\n" in page.partition(render_ddp.output(name))[0]


def test_output_of_another_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "one_rank", "python train.py")
    with pytest.raises(ValueError, match="the command has changed"):
        render_ddp.output("one_rank")


def test_the_benchmark_is_as_noisy_as_the_page_says() -> None:
    lines = re.findall(r"^([A-Z]+) +([\d,]+) \+/- ([\d,]+)$", shown("benchmark"), re.MULTILINE)
    found = {kind: (int(mean.replace(",", "")), int(deviation.replace(",", ""))) for kind, mean, deviation in lines}
    del found["IO"]
    assert found["FULL"] > found["COMPUTE"]
    means, deviations = zip(*found.values(), strict=True)
    assert len(means) == 4
    assert max(means) - min(means) < min(deviations)
    assert "Too noisy: " in shown("benchmark")


def test_every_line_of_the_job_file_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = render_ddp.job_file()
    assert "| `--ntasks-per-node=2` |" in shown or "| `#SBATCH --ntasks-per-node=2` |" in shown
    job = (render_ddp.LESSON / "job.slurm").read_text()
    monkeypatch.setattr(render_ddp, "LESSON", tmp_path)
    (tmp_path / "job.slurm").write_text(job.replace("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --exclusive\n"))
    with pytest.raises(ValueError, match="--exclusive"):
        render_ddp.job_file()
    (tmp_path / "job.slurm").write_text(job.replace("MASTER_PORT=", "PORT="))
    with pytest.raises(ValueError, match="'MASTER_PORT='"):
        render_ddp.job_file()


def test_the_ring_adds_up_in_2_times_n_minus_1_messages() -> None:
    frames = render_ddp.ring_frames()
    ranks = range(render_ddp.RANKS)
    assert len(frames) - 1 == 2 * (render_ddp.RANKS - 1)
    everything = frozenset(ranks)
    half = frames[render_ddp.RANKS - 1][1]
    assert [chunks.count(everything) for chunks in half] == [1] * render_ddp.RANKS
    assert all(chunks == [everything] * render_ddp.RANKS for chunks in frames[-1][1])
    for _, _, sent in frames[:-1]:
        assert sorted(rank for rank, _ in sent) == list(ranks)  # each rank sends one chunk at a time


def test_plots_are_drawn_from_the_results(tmp_path: Path) -> None:
    curves = load("batches")["curves"]
    render_ddp.draw_curves(curves, render_ddp.FOUR, ("epochs", "training steps"), tmp_path / "curves.png")
    render_ddp.draw_ring(tmp_path / "ring.png")
    render_ddp.draw_learning_rates(tmp_path / "rates.png")
    render_ddp.draw_predicted(tmp_path / "predicted.png")
    render_ddp.redraw_allreduce(tmp_path / "allreduce.png")
    for name in ("curves", "ring", "rates", "predicted", "allreduce"):
        assert imread(tmp_path / f"{name}.png").shape[1] > 800, name
    assert set(render_ddp.FOUR) | set(render_ddp.LONG) == curves.keys() == render_ddp.COLOURS.keys()


def test_what_the_page_says_of_large_batches_holds() -> None:
    """By epoch the small batch wins with every seed, by step the long schedule does."""
    curves = load("batches")["curves"]
    for number, small in enumerate(curves["cifar10_b64"]):
        for name in render_ddp.FOUR[1:]:
            assert curves[name][number]["val_loss"][4] > small["val_loss"][4]
        assert curves["cifar10_b512_sqrt_long"][number]["val_loss"][-1] <= small["val_loss"][-1]
    ends = [curve["val_loss"][-1] for curve in curves["cifar10_b64"]]
    assert 1.9 < max(ends) / min(ends) < 2.5  # "by up to a factor of two"


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


def test_the_step_on_the_page_shows_what_the_text_says() -> None:
    """The first all-reduce begins before backward ends, and each ends at about the same time on both ranks."""
    zero, one = load("ddp_step", render_ddp.STEP_MACHINE)["ranks"]
    for step in (zero, one):
        ((_, end),) = step["backward"]
        assert step["all-reduces"][0][0] < end
        assert step["all-reduces"][-1][1] <= end
    for (_, end_of_zero), (_, end_of_one) in zip(zero["all-reduces"], one["all-reduces"], strict=True):
        assert math.isclose(end_of_zero, end_of_one, abs_tol=10)


def test_a_hang_is_seen_by_the_flight_recorder(user_environment: dict[str, str], tmp_path: Path) -> None:
    """It prints what the page shows, with the lines of the source, but for the shorter timeout."""
    flags = ["--timeout", 2, "--out", tmp_path]
    main, other = start_ranks(
        2, "experiments/flight_recorder.py", *flags, cwd=render_ddp.LESSON, environment=user_environment
    )
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
    main, _ = start_ranks(2, script, *flags, cwd=render_ddp.LESSON, environment=user_environment)
    assert main.stdout == shown(name)
