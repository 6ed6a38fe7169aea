"""plan.py of lesson 05: its flags are those of train.py, and its memory is what the null GPU counts."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from lab.launching import load_script

LESSON = REPOSITORY / "05_fully_sharded"
sys.path.insert(0, str(LESSON / "experiments"))

import plan as planning  # noqa: E402
import plan_answer  # noqa: E402
import plan_text  # noqa: E402
import plan_trials  # noqa: E402
from workshop.config import load_config  # noqa: E402
from workshop.errors import UserError  # noqa: E402
from workshop.models.gpt import SIZES  # noqa: E402

TRAIN: Any = load_script(LESSON)


def made_plan(way: plan_trials.Way, tokens: float = 21e9, data_tokens: float | None = None) -> plan_answer.Plan:
    """The plan for gpt_1b on 64 GPUs, with a way that nobody has tried."""
    gpus = plan_trials.Gpus("a100", 80, nodes=8, per_node=8, peak=312e12, sixteen="bf16", sm=80)
    model = plan_trials.Model(("--model", "gpt_1b"), SIZES["gpt_1b"], 2048)
    return plan_answer.Plan(model, gpus, plan_answer.RECIPES[3], 16, tokens, [way], [], data_tokens)


@pytest.mark.parametrize("weights", [3e7, 124e6, 3e8, 1e9, 1.3e9, 2.7e9, 7e9, 13e9, 70e9])
def test_a_model_of_any_size_has_about_so_many_weights_and_a_usual_shape(weights: float) -> None:
    model = plan_trials.model_of(weights, 2048)
    assert model.weights == pytest.approx(weights, rel=0.05)
    assert 32 <= model.size.width / model.size.depth <= 160
    config = load_config(TRAIN.Config, list(model.flags))
    assert TRAIN.gpt_size(config.model, config.width, config.depth, config.vocabulary) == model.size


def test_a_size_that_the_lesson_has_no_model_for_is_refused() -> None:
    with pytest.raises(UserError, match="--weights 1e\\+13"):
        plan_trials.model_of(1e13, 2048)


def test_each_case_of_the_table_is_planned_with_the_lessons_script(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[list] = []

    def plan_of(arguments: argparse.Namespace, fewer: bool) -> plan_answer.Plan:
        assert arguments.script == LESSON / "train.py"
        assert not fewer
        return made_plan(plan_trials.Way("blocks", part=16, parts=1, seconds=1.5, needed=70 << 30))

    monkeypatch.setattr(planning, "plan_of", plan_of)
    monkeypatch.setattr(planning, "store_cases", lambda rows: tables.append([*rows]))
    monkeypatch.setattr(planning.results, "unfinished_rows", lambda name: [])
    planning.compare_cases()
    assert [len(rows) for rows in tables] == [*range(1, len(planning.CASES) + 1)]
    assert all(row[3] == 70 and row[4] == 1.5 for row in tables[-1])


@pytest.mark.parametrize(
    "way",
    [
        plan_trials.Way("none", part=8, parts=2, seconds=1.4),
        plan_trials.Way("blocks", part=16, parts=1, seconds=1.5),
        plan_trials.Way("blocks", replicas=8, recomputed=True, part=4, parts=4, seconds=2.0),
    ],
)
@pytest.mark.parametrize("tokens", [3e6, 21e9, 1e12])
def test_the_printed_flags_train_on_as_many_tokens_as_asked_for(way: plan_trials.Way, tokens: float) -> None:
    plan = made_plan(way, tokens)
    lines = plan_text.job_lines(plan, way, interval=500.0, slowest=3.0)
    command = " ".join(line.rstrip("\\") for line in lines if not line.startswith(("#", "source")))
    flags = shlex.split(command.partition("64_gpus.slurm")[2])
    config = load_config(TRAIN.Config, flags)
    assert (config.shard, config.replicas, config.accumulate) == (way.shard, way.replicas, way.parts)
    assert TRAIN.batch_size_per_rank(config, 64) == 16 == way.part * way.parts
    steps = config.epochs * config.limit_train // config.global_batch_size
    assert steps == pytest.approx(plan.steps, rel=0.05, abs=1)
    assert config.warmup_steps <= max(1, steps // 20)


def test_an_epoch_is_no_longer_than_the_users_file() -> None:
    way = plan_trials.Way("none", part=8, parts=2, seconds=1.4)
    plan = made_plan(way, tokens=12e9, data_tokens=3e9)
    text = "\n".join(plan_text.job_lines(plan, way, interval=500.0, slowest=3.0))
    (epochs,), (limit,) = re.findall(r"--epochs (\d+)", text), re.findall(r"--limit_train (\d+)", text)
    assert int(limit) * 2048 <= 3e9 and int(epochs) * int(limit) * 2048 == pytest.approx(12e9, rel=0.01)
    assert "4 passes over your tokens" in text
    with pytest.raises(UserError, match="less than a step"):
        plan_text.job_lines(made_plan(way, data_tokens=1e6), way, interval=500.0, slowest=3.0)


@pytest.mark.parametrize(
    ("smallest", "numbers"), [(1, "1, 2, 8, 16, 64"), (8, "8, 16, 64")], ids=["fits on one", "fits on a node"]
)
def test_fewer_gpus_are_compared_with_the_same_batch_on_each(smallest: int, numbers: str) -> None:
    way = plan_trials.Way("blocks", part=4, parts=4, needed=60 * 2**30, seconds=1.0)
    text = plan_text.sizes(made_plan(way), smallest, way)
    assert f"to measure {numbers} GPUs alike" in text
    flags = text.partition("take ")[2].partition(";")[0].split()
    config = load_config(TRAIN.Config, ["--shard", "blocks", *flags])
    assert (config.batch_size, config.accumulate, config.reduce_each_part) == (16, 4, True)
    assert ("--depth" in text) == (smallest > 1)


def test_a_vocabulary_of_ones_own_is_that_of_the_model() -> None:
    model = plan_trials.model_of(1e9, 2048, 4096)
    config = load_config(TRAIN.Config, list(model.flags))
    assert TRAIN.gpt_size(config.model, config.width, config.depth, config.vocabulary) == model.size
    assert model.size.vocabulary == 4096 and model.weights == pytest.approx(1e9, rel=0.05)


def test_own_data_are_replaced_by_zeros_and_other_files_are_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("train.uint16", "names.txt"):
        (tmp_path / "mine" / name).write_text("few")
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "mine"))
    plan = made_plan(plan_trials.Way("none"))
    trials = plan_trials.Trials(tmp_path / "train.py", plan.model, plan.gpus, [], tmp_path)
    (tmp_path / "data").mkdir()
    folder = trials.data(tmp_path / "data", 100)
    assert (folder / "train.uint16").stat().st_size >= 2 * 100 * 2049
    assert (folder / "val.uint16").stat().st_size >= 2 * 64 * 2049
    assert (folder / "names.txt").read_text() == "few"
    assert (tmp_path / "mine/train.uint16").read_text() == "few", "the user's own file is as it was"


def test_the_fastest_way_that_fits_is_taken() -> None:
    ways = [
        plan_trials.Way("none", part=0, needed=9e10),
        plan_trials.Way("blocks", part=2, parts=8, seconds=3.0),
        plan_trials.Way("blocks", replicas=8, part=4, parts=4, seconds=2.0),
    ]
    assert replace(made_plan(ways[0]), ways=ways).best == ways[2]
    assert replace(made_plan(ways[0]), ways=ways[:1]).best is None
    alike = [ways[0], replace(ways[1], seconds=2.03), ways[2]]
    assert replace(made_plan(ways[0]), ways=alike).best == alike[1], "a hundredth is no reason for replicas"


def test_a_plan_whose_time_depends_on_this_machine_says_so() -> None:
    """On a busy machine another way was once the fastest: what the GPU waits for the host is this machine's."""
    ways = [
        plan_trials.Way("none", part=8, parts=2, seconds=1.4, waits={"the host": 0.02}),
        plan_trials.Way("blocks", part=16, parts=1, seconds=1.3, waits={"the host": 0.31, "communication": 0.1}),
        plan_trials.Way("blocks", replicas=8, needed=9e10),
    ]
    slow = replace(made_plan(ways[0]), ways=ways)
    assert plan_text.slowed_by_host(slow).startswith("with --shard blocks\nthe GPU waits for the host 31% of the time")
    assert plan_text.slowed_by_host(made_plan(ways[0])) == ""


def ask(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "experiments/plan.py", *map(str, flags)]
    return subprocess.run(command, cwd=LESSON, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "abacus"], "--gpu abacus: .*there is no abacus"),
        (["--tokens", "-1"], "--tokens must be above 0"),
        (["--script", "nowhere.py"], "--script nowhere.py: there is no such file"),
        (["--model", "gpt_1b", "--weights", "1e9"], "not allowed with argument"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_status_2(flags: list[str], message: str) -> None:
    done = ask(*flags)
    assert done.returncode == 2
    assert re.search(message, done.stderr) and done.stderr.count("\n") == 1, done.stderr


SMALL = ["--model", "gpt_tiny", "--sequence_length", 128, "--gpu", "a100", "--gpus_per_node", 2, "--tokens", 1e6]


@pytest.mark.thorough
def test_a_small_plan_is_made_from_beginning_to_end(tmp_path: Path) -> None:
    """With little memory it takes smaller parts; with too little it says what would help."""
    needed = {}
    for gb in (80, 3.3):
        done = ask(*SMALL, "--tokens_per_step", 65_536, "--gb", gb, "--json", tmp_path / "plan.json")
        assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads((tmp_path / "plan.json").read_text())
        assert figures["fits"] and figures["global_batch_size"] * 128 == 65_536
        (best,) = (way for way in figures["ways"] if way["seconds"] == figures["seconds"])
        assert best["part"] * best["parts"] * 2 == figures["global_batch_size"] and best["needed"] <= gb * 2**30
        needed[gb] = best["part"]
        waits = max(way["waits"].get("the host", 0.0) for way in figures["ways"])
        assert waits > 0, "a small model waits for the host"
        assert ("the GPU waits for the host" in done.stdout) == (waits >= plan_text.HOST_DECIDES), done.stdout
    assert needed[3.3] < needed[80]
    done = ask(*SMALL, "--tokens_per_step", 65_536, "--gb", 3.001)
    assert done.returncode == 1 and "It does not fit. What would change that:" in done.stdout
