"""Checkpoints of lesson 05, whole and sharded: any number of ranks continues from them, and from nothing but good ones.

What is stopped within an epoch continues bit for bit, on as many ranks. Another number of ranks adds up gradients in
another order, so its losses are equal up to rounding.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from conftest import REPOSITORY, Result, Script
from ranks import start_ranks
from test_survive import assert_equal, cut_short, one_line, results_of

pytestmark = pytest.mark.slow

LESSON = REPOSITORY / "05_fully_sharded"
SIGNALLED = REPOSITORY / "tests" / "signalled.py"
SHORT = ["--limit_train", 80, "--limit_val", 16, "--global_batch_size", 8, "--epochs", 2, "--save_interval", 4]
SHORT += ["--loader", "memory", "--num_workers", 0, "--vit_width", 16, "--vit_depth", 2]  # 10 steps an epoch
SHORT += ["--resume", "true"]
WHOLE, SHARDED = ["--checkpoint_form", "whole"], ["--checkpoint_form", "sharded"]
FORMS = {"whole": WHOLE, "sharded": SHARDED, "async": [*SHARDED, "--async_save", "true"]}
CHECKPOINTS = {"whole": ("checkpoint.pt", "checkpoint.previous.pt")}
CHECKPOINTS["sharded"] = CHECKPOINTS["async"] = ("checkpoint.sharded", "checkpoint.previous.sharded")

Start = Callable[..., list[Result]]


@pytest.fixture(scope="module")
def start(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts ranks of the lesson; each rank is a process."""
    variables = {"WORKSHOP_DATA": str(data_dir), "WORKSHOP_RUNS": str(tmp_path_factory.mktemp("runs"))}

    def start(ranks: int, run_dir: Path, *flags: object, stop_at: int | None = None) -> list[Result]:
        script = ["train.py"] if stop_at is None else [SIGNALLED, ranks - 1, stop_at, "SIGTERM", "train.py"]
        command = [*script, *SHORT, *flags, "--run_dir", run_dir]
        results = start_ranks(ranks, *command, cwd=LESSON, environment=os.environ | variables)
        assert [result.status for result in results] == [0] * ranks, results[0].stderr + results[-1].stderr
        return results

    return start


@pytest.fixture(scope="module")
def two_epochs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a run of two ranks, of two epochs, in a form; started when it is first asked for."""
    folder = tmp_path_factory.mktemp("two_epochs")

    def run(form: str) -> Path:
        if not (folder / form).exists():
            start(2, folder / form, *FORMS[form])
        return folder / form

    return run


@pytest.fixture
def alone(run_script: Script) -> Script:
    return partial(run_script, "05_fully_sharded/train.py", *SHORT)


def state_of(checkpoint: Path, scratch: Path) -> dict:
    """All that a checkpoint of either form holds, except for times and for what the lesson does not seed."""
    if checkpoint.suffix == ".pt":
        state = torch.load(checkpoint, weights_only=True)
    else:
        dcp_to_torch_save(checkpoint, scratch / "state.pt")
        state = torch.load(scratch / "state.pt", weights_only=True)
        state |= torch.load(checkpoint / "run.pt", weights_only=True)
        del state["structure"]
    for rank in state["run"]["ranks"]:
        del rank["random"]["python"], rank["random"]["numpy"]
    for group in state["optimizer"]["param_groups"]:
        group |= {name: list(value) for name, value in group.items() if isinstance(value, tuple)}  # as torch does, too
    return state


def back_to_step_8(run_dir: Path, form: str, copy: Path) -> Path:
    """A copy of a run as it was after its last save but one."""
    shutil.copytree(run_dir, copy)
    latest, before = (copy / name for name in CHECKPOINTS[form])
    shutil.rmtree(latest) if latest.is_dir() else latest.unlink()
    before.rename(latest)
    return copy


def test_all_forms_hold_the_same(two_epochs: Callable, tmp_path: Path) -> None:
    """Also what is saved in a thread is the state of its moment, although training goes on."""
    for number in (0, 1):
        states = [state_of(two_epochs(form) / CHECKPOINTS[form][number], tmp_path) for form in FORMS]
        assert states[0]["run"]["step"] == (0, 8)[number]
        assert any("exp_avg" in name for state in states[0]["optimizer"]["state"].values() for name in state)
        for state in states[1:]:
            assert_equal(state, states[0])
    for form in FORMS:
        assert results_of(two_epochs(form)) == results_of(two_epochs("whole"))
        assert not list(two_epochs(form).glob("*tmp*"))


@pytest.mark.parametrize("form", FORMS)
def test_a_stopped_run_continues_bit_for_bit(start: Start, two_epochs: Callable, tmp_path: Path, form: str) -> None:
    flags = FORMS[form]
    stopped = start(2, tmp_path / "run", *flags, stop_at=13)
    assert "stopped by SIGTERM: saved after step" in stopped[0].stdout
    resumed = start(2, tmp_path / "run", *flags)
    latest = CHECKPOINTS[form][0]
    assert f"resumed from {tmp_path}/run/{latest} after step" in resumed[0].stdout
    assert_equal(state_of(tmp_path / "run" / latest, tmp_path), state_of(two_epochs(form) / latest, tmp_path))
    assert results_of(tmp_path / "run") == results_of(two_epochs(form))


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_any_number_of_ranks_continues(
    start: Start, two_epochs: Callable, alone: Script, tmp_path: Path, form: str
) -> None:
    flags = [*FORMS[form], "--epochs", 3]
    losses = {}
    for ranks in (1, 2, 4):
        run_dir = shutil.copytree(two_epochs(form), tmp_path / str(ranks))
        result = alone(*flags, "--run_dir", run_dir) if ranks == 1 else start(ranks, run_dir, *flags)[0]
        assert result.status == 0, result.stderr
        wrote = "" if ranks == 2 else ", written by 2 rank(s)"
        assert f"resumed from {run_dir}/{CHECKPOINTS[form][0]} after epoch 2{wrote}\n" in result.stdout
        losses[ranks] = results_of(run_dir)
        assert len(losses[ranks]) == 3
    for ranks in (1, 4):
        torch.testing.assert_close(torch.tensor(losses[ranks]), torch.tensor(losses[2]), rtol=1e-5, atol=0)


def test_a_changed_learning_rate_is_honoured(alone: Script, two_epochs: Callable, tmp_path: Path) -> None:
    losses = []
    for form, lr in (("whole", 1e-3), ("whole", 1e-2), ("sharded", 1e-2)):
        run_dir = shutil.copytree(two_epochs(form), tmp_path / f"{form} {lr}")
        result = alone(*FORMS[form], "--lr", lr, "--epochs", 3, "--run_dir", run_dir)
        assert result.status == 0 and ("with --lr 0.01 in place of 0.001" in result.stdout) == (lr == 1e-2)
        losses.append(results_of(run_dir))
        state = state_of(run_dir / CHECKPOINTS[form][0], tmp_path)
        assert [group["initial_lr"] for group in state["optimizer"]["param_groups"]] == [lr]
        assert state["scheduler"]["base_lrs"] == [lr]
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_within_an_epoch_as_many_ranks_have_to_continue(
    alone: Script, two_epochs: Callable, tmp_path: Path, form: str
) -> None:
    run_dir = back_to_step_8(two_epochs(form), form, tmp_path / "run")
    before = contents(run_dir)
    line = one_line(alone(*FORMS[form], "--run_dir", run_dir))
    assert "world_size is 2 there and 1 here, and it was saved in the middle of epoch 2" in line
    assert contents(run_dir) == before


def contents(folder: Path) -> dict[str, bytes]:
    checkpoints = [
        file for file in folder.rglob("*") if file.is_file() and "checkpoint" in str(file.relative_to(folder))
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in checkpoints}


def test_what_does_not_fit_is_refused_and_nothing_is_overwritten(
    alone: Script, two_epochs: Callable, tmp_path: Path
) -> None:
    for form, other in (("whole", "sharded"), ("sharded", "whole")):
        run_dir = shutil.copytree(two_epochs(form), tmp_path / form)
        before = contents(run_dir)
        path = run_dir / CHECKPOINTS[form][0]
        for flags, message in (
            (["--checkpoint_form", form, "--vit_width", 32], f"{path} does not fit this run: model."),
            (["--checkpoint_form", form, "--vit_depth", 3], f"{path} does not fit this run: only one of the two has"),
            (["--checkpoint_form", form, "--optimizer", "sgd"], "optimizer is adam there and sgd here"),
            (["--checkpoint_form", form, "--global_batch_size", 16], "global_batch_size is 8 there and 16 here"),
            (
                ["--checkpoint_form", other],
                f"{path} is a checkpoint of another form: lesson 05 continues from it with ",
            ),
        ):
            line = one_line(alone(*flags, "--epochs", 3, "--run_dir", run_dir))
            assert message in line, line
            assert contents(run_dir) == before
        assert f"--checkpoint_form {form}; or give another --run_dir" in line
    assert "--async_save true needs" in one_line(alone(*WHOLE, "--async_save", "true", "--run_dir", tmp_path / "no"))


def zero_bytes(file: Path) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1000] = bytes(1000)
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "zeroed shard": ("__1_0.distcp", zero_bytes, "wrong checksum of __1_0.distcp"),
    "truncated shard": ("__0_0.distcp", cut_short, "__0_0.distcp has "),
    "missing shard": ("__1_0.distcp", Path.unlink, "__1_0.distcp is missing"),
    "zeroed metadata": (".metadata", zero_bytes, "wrong checksum of .metadata"),
    "missing metadata": (".metadata", Path.unlink, ".metadata is missing"),
    "zeroed random states": ("run.pt", zero_bytes, "wrong checksum of run.pt"),
    "missing checksums": ("checksums.json", Path.unlink, "checksums.json is missing"),
    "truncated checksums": ("checksums.json", cut_short, "checksums.json cannot be understood"),
    "empty checksums": (
        "checksums.json",
        lambda file: file.write_text('{"": {}}'),
        "checksums.json does not name all files",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    alone: Script, two_epochs: Callable, tmp_path: Path, damage: str
) -> None:
    """The one before is of the middle of an epoch here, so that one rank refuses it: it has been found all the same."""
    name, harm, reason = DAMAGES[damage]
    run_dir = shutil.copytree(two_epochs("sharded"), tmp_path / "run")
    latest, before = (run_dir / folder for folder in CHECKPOINTS["sharded"])
    damaged, good = run_dir / "checkpoint.damaged.sharded", contents(before)
    harm(latest / name)
    again = ["--epochs", 2, *SHARDED, "--run_dir", run_dir]
    assert "saved in the middle of epoch 2" in one_line(alone(*again))
    assert contents(before) == good and damaged.exists() and not latest.exists()

    shutil.rmtree(damaged)
    shutil.copytree(before, latest)
    harm(latest / name)
    harm(before / name)
    line = one_line(alone(*again))
    assert f"cannot go on: {latest} is damaged ({reason}" in line and "no earlier one is good; delete" in line


def test_two_ranks_continue_from_the_one_before(start: Start, two_epochs: Callable, tmp_path: Path) -> None:
    run_dir = shutil.copytree(two_epochs("sharded"), tmp_path / "run")
    latest, before = (run_dir / folder for folder in CHECKPOINTS["sharded"])
    zero_bytes(latest / "__1_0.distcp")
    result = start(2, run_dir, *SHARDED)[0]
    assert (
        f"resumed from {before}, as {latest} is damaged (wrong checksum of __1_0.distcp), after step 8" in result.stdout
    )
    wanted = state_of(two_epochs("sharded") / latest.name, tmp_path)
    assert_equal(state_of(latest, tmp_path), wanted)
    assert (run_dir / "checkpoint.damaged.sharded").exists()


def test_a_new_run_replaces_checkpoints_of_both_forms(alone: Script, two_epochs: Callable, tmp_path: Path) -> None:
    run_dir = shutil.copytree(two_epochs("sharded"), tmp_path / "run")
    shutil.copy(two_epochs("whole") / "checkpoint.pt", run_dir)
    assert alone(*WHOLE, "--resume", "false", "--epochs", 1, "--run_dir", run_dir).status == 0
    assert {file.name for file in run_dir.glob("checkpoint*")} == {"checkpoint.pt", "checkpoint.previous.pt"}


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_killed_before_every_operation_on_a_file(tmp_path: Path, form: str) -> None:
    script = REPOSITORY / "tests" / "killed_at_every_write.py"
    output = subprocess.run([sys.executable, script, form, tmp_path], capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    found = json.loads(output.stdout)
    assert found["killed"] >= (8 if form == "whole" else 20)
    assert found["statuses"] == [-signal.SIGKILL] * found["killed"] + [0]
    assert max(found["lost"]) <= 1
