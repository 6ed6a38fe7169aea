"""What a run survives: it goes on bit for bit where it was, from the last good checkpoint, whatever ended it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import quick_python
from conftest import REPOSITORY, Result, Script

STEP_BEGINS = "workshop.log.Log.start_step"
"""a lesson calls it in each step: call n is step n"""

COMMON = ["--limit_train", 80, "--limit_val", 16, "--epochs", 2, "--log_interval", 1, "--save_interval", 4]
MEMORY = ["--loader", "memory"]
ONE_EPOCH = ["--limit_train", 64, "--limit_val", 16, "--batch_size", 8]
SMALL_GPT = ["--width", 64, "--depth", 2, "--sequence_length", 16]
OF_LESSON = {"01_single_gpu": MEMORY, "03_ddp": MEMORY, "05_fully_sharded": SMALL_GPT}
STEPS = 10
"""steps of 8 samples in an epoch; a checkpoint after steps 4 and 8"""


@dataclass(frozen=True)
class Lesson:
    """A kind of run."""

    folder: str
    ranks: int
    flags: list

    def command(self, run_dir: Path, *more: object, fault: tuple = (), ranks: int | None = None) -> list[str]:
        """The words that start or resume the run, perhaps with a fault; see with_fault.py."""
        ranks = ranks or self.ranks
        python = ["torchrun", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else ["python"]
        script = [*((REPOSITORY / "tests/with_fault.py", *fault) if fault else ()), "train.py", *COMMON, *self.flags]
        words = [*python, *script, "--batch_size", 8 // ranks, "--run_dir", run_dir, "--resume", "true", *more]
        return [str(quick_python.commands() / str(words[0])), *map(str, words[1:])]

    def train(self, run_dir: Path, environment: dict[str, str], *more: object, **how: object) -> Result:
        """Start or resume the run, and wait for its end."""
        command = self.command(run_dir, *more, **how)
        done = subprocess.run(command, cwd=REPOSITORY / self.folder, env=environment, capture_output=True, text=True)
        return Result(done.returncode, done.stdout, done.stderr)


LESSONS = {
    "01": Lesson("01_single_gpu", 1, ["--loader", "map"]),
    "02": Lesson("02_dataparallel", 1, MEMORY),
    "03": Lesson("03_ddp", 2, ["--loader", "map"]),
    "04": Lesson("04_mixed_precision", 1, ["--precision", "bf16", *MEMORY]),
    "05": Lesson("05_fully_sharded", 2, SMALL_GPT),
    "05 async": Lesson("05_fully_sharded", 2, [*SMALL_GPT, "--async_save", "true"]),
    "05 HSDP": Lesson("05_fully_sharded", 4, [*SMALL_GPT, "--replicas", 2]),
}


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest first."""
    whole = [run_dir / name for name in ("checkpoint.pt", "checkpoint.previous.pt")]
    sharded = [file.parent for file in sorted(run_dir.glob("checkpoints/*/.metadata"), reverse=True)]
    return [*filter(Path.exists, whole), *sharded]


def final_state(run_dir: Path) -> dict:
    """All numbers that a run has come to: the newest checkpoint, and the losses of each epoch."""
    file = checkpoints(run_dir)[0]
    if file.is_dir():
        dcp_to_torch_save(file, run_dir / "whole.pt")
        file = run_dir / "whole.pt"
    state = torch.load(file, weights_only=True)
    for name in ("settings", "rest"):
        state.pop(name, None)
    return state | {"losses": losses(run_dir)}


def losses(run_dir: Path) -> list[float]:
    epochs = json.loads((run_dir / "summary.json").read_text())["epochs"]
    return [epoch[name] for epoch in epochs for name in ("train_loss", "val_loss")]


def assert_equal(one: object, other: object) -> None:
    """Check that two states are equal bit for bit in all nested parts."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "03" else [pytest.mark.thorough]) for name in LESSONS]
)
def test_a_run_that_is_killed_and_stopped_goes_on_as_if_it_were_not(
    name: str, user_environment: dict[str, str], tmp_path: Path
) -> None:
    lesson = LESSONS[name]
    whole = lesson.train(tmp_path / "whole", user_environment)
    assert whole.status == 0, whole.stderr

    within_an_epoch = lesson.train(
        tmp_path / "run", user_environment, fault=(lesson.ranks - 1, STEP_BEGINS, 7, "SIGKILL")
    )
    assert within_an_epoch.status != 0
    assert "step  6/10" in within_an_epoch.stdout and "step  8/10" not in within_an_epoch.stdout

    operation = 16 if "05" in name else 7  # while it saves: reading the checkpoint takes fewer operations
    at_a_save = lesson.train(tmp_path / "run", user_environment, fault=(0, "files", operation, "SIGKILL"))
    assert at_a_save.status != 0
    if name != "05 async":  # whose thread may not have been ready before the kill
        assert re.search(r"resumed from \S+: epoch 1, after step 4\n", at_a_save.stdout)

    by_signal = None
    if name >= "03":
        fault = (lesson.ranks - 1, STEP_BEGINS, 2, "SIGUSR1")
        by_signal = lesson.train(tmp_path / "run", user_environment, fault=fault)
        assert by_signal.status == 0, by_signal.stderr
        assert re.search(r"stopped and saved in epoch \d; --resume true continues after step \d+\n", by_signal.stdout)

    rest = lesson.train(tmp_path / "run", user_environment)
    assert rest.status == 0, rest.stderr
    if by_signal:
        stopped = re.search(r"in epoch (\d); .* after step (\d+)", by_signal.stdout).groups()
        assert "epoch {}, after step {}\n".format(*stopped) in rest.stdout
    assert_equal(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["03", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("05", "05 HSDP"))]
)
def test_on_another_number_of_ranks_every_sample_counts_once(
    name: str, user_environment: dict[str, str], tmp_path: Path
) -> None:
    """The same steps, added up in another order: the losses of both epochs agree but for rounding."""
    lesson = LESSONS[name]
    flags = [*MEMORY, "--dropout", "false"] if name == "03" else []  # whose random numbers follow from the rank
    alone = ["--replicas", 1] if "HSDP" in name else []
    one = lesson.train(tmp_path / "one", user_environment, *flags, *alone, ranks=1)
    assert one.status == 0, one.stderr
    stop = (1, STEP_BEGINS, 7, "SIGUSR1")
    stopped = lesson.train(tmp_path / "two", user_environment, *flags, fault=stop)
    assert "stopped and saved in epoch 1" in stopped.stdout, stopped.stderr
    more = lesson.train(tmp_path / "two", user_environment, *flags, *alone, ranks=4 if name == "03" else 1)
    assert more.status == 0, more.stderr
    assert "epoch 1, after step 7\n" in more.stdout
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    run_script: Script, tmp_path: Path, damage: Callable
) -> None:
    flags = [*COMMON, *MEMORY, "--batch_size", 8, "--run_dir", tmp_path, "--resume", "true"]
    assert run_script("01_single_gpu/train.py", *flags).status == 0
    whole = final_state(tmp_path)
    damage(tmp_path / "checkpoint.pt")
    resumed = run_script("01_single_gpu/train.py", *flags)
    assert resumed.status == 0, resumed.stderr
    before = tmp_path / "checkpoint.previous.pt"
    assert resumed.stderr == f"warning: {tmp_path}/checkpoint.pt is damaged; continuing from {before}\n"
    assert f"resumed from {before}: epoch 2, after step 8\n" in resumed.stdout
    assert_equal(final_state(tmp_path), whole)

    for file in checkpoints(tmp_path):
        damage(file)
    files = {file: file.read_bytes() for file in checkpoints(tmp_path)}
    for _ in range(2):
        error = run_script("01_single_gpu/train.py", *flags).error
        assert f"{tmp_path}/checkpoint.pt and {before} damaged: delete them to start afresh" in error
        assert {file: file.read_bytes() for file in checkpoints(tmp_path)} == files


@pytest.mark.slow
def test_a_damaged_sharded_checkpoint_is_noticed_and_the_one_before_is_used(
    user_environment: dict[str, str], tmp_path: Path, run_script: Script
) -> None:
    lesson = LESSONS["05"]
    assert lesson.train(tmp_path / "whole", user_environment).status == 0
    last, before = [folder.name for folder in checkpoints(tmp_path / "whole")]
    flags = [*COMMON, *lesson.flags, "--batch_size", 8, "--resume", "true"]  # on one rank
    damages: dict[str, Callable[[Path], None]] = {
        "flipped bit": lambda folder: flip_a_bit(folder / "__1_0.distcp"),
        "truncated": lambda folder: cut_short(folder / "__0_0.distcp"),
        "metadata": lambda folder: flip_a_bit(folder / ".metadata"),
        "missing shard": lambda folder: (folder / "__1_0.distcp").unlink(),
    }
    for name, damage in damages.items():
        run_dir = tmp_path / name
        shutil.copytree(tmp_path / "whole", run_dir)
        damage(run_dir / "checkpoints" / last)
        resumed = run_script("05_fully_sharded/train.py", *flags, "--run_dir", run_dir)
        assert resumed.status == 0, (name, resumed.stderr)
        assert f"warning: {run_dir}/checkpoints/{last} is damaged" in resumed.stderr
        assert f"resumed from {run_dir}/checkpoints/{before}: epoch 2, after step 8\n" in resumed.stdout
        assert losses(run_dir) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)

    folders = checkpoints(tmp_path / "whole")
    for folder in folders:
        damages["flipped bit"](folder)
    for _ in range(2):  # also the second time: nothing is begun afresh unless the user has deleted them
        error = run_script("05_fully_sharded/train.py", *flags, "--run_dir", tmp_path / "whole").error
        assert f"all checkpoints in {tmp_path}/whole/checkpoints are damaged: delete them to start afresh" in error
    assert checkpoints(tmp_path / "whole") == folders


SMALL_DISK = """
import os, runpy, subprocess, sys
import torch.distributed.checkpoint, torch.utils.tensorboard

disk, size, *flags = sys.argv[1:]

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)

def live(*more):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.argv = ["train.py", *flags, *more]
        runpy.run_path("train.py", run_name="__main__")
        sys.exit()
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

mount(f"size={size}")
live()
mount("remount,size=80m")
live()
mount("remount,ro")
live("--epochs", "3")
"""
"""run the script on a disk that is full after two checkpoints, then large enough, then read-only"""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "size"), [("01", "38m"), ("05", "4700k")])
def test_a_full_and_a_read_only_disk_leave_the_earlier_checkpoints(
    name: str, size: str, user_environment: dict[str, str], tmp_path: Path
) -> None:
    """A checkpoint of lesson 01 has 14 MB, one of the small model of lesson 05 less than 2 MB."""
    lesson = LESSONS[name]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    unshare = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", run_dir], capture_output=True).returncode:
        pytest.skip("a user may not mount a disk here")
    flags = [*COMMON, *lesson.flags, "--batch_size", 8, "--run_dir", run_dir, "--resume", "true"]
    flags += MEMORY if name == "01" else []
    done = subprocess.run(
        [*unshare, sys.executable, "-c", SMALL_DISK, *map(str, [run_dir, size, *flags])],
        cwd=REPOSITORY / lesson.folder,
        env=user_environment,
        capture_output=True,
        text=True,
    )
    assert re.findall(r"status (\d+)", done.stdout) == ["2", "0", "2"], done.stdout + done.stderr
    assert re.search(r"resumed from \S+: epoch 1, after step \d\n", done.stdout)
    full, read_only = done.stderr.splitlines()
    assert full.startswith("error: ")
    assert "No space left on device" in full or "free some space" in full  # the latter, where torch reports no errno
    assert read_only.startswith("error: ") and "Read-only file system" in read_only


def test_a_checkpoint_of_other_flags_is_refused(run_script: Script, tmp_path: Path) -> None:
    flags = [*ONE_EPOCH, "--run_dir", tmp_path, "--resume", "true"]
    for script, own, others in (
        ("01_single_gpu", MEMORY, {"lr": 0.5, "optimizer": "sgd", "dropout": "false", "limit_train": 32, "seed": 2}),
        ("05_fully_sharded", SMALL_GPT, {"lr": 0.5, "width": 128, "sequence_length": 8, "precision": "bf16"}),
    ):
        run = [*flags, "--run_dir", tmp_path / script, *own]
        assert run_script(f"{script}/train.py", *run).status == 0
        before = {file: file.stat().st_mtime_ns for file in checkpoints(tmp_path / script)}
        for flag, value in others.items():
            result = run_script(f"{script}/train.py", *run, "--epochs", 2, f"--{flag}", value)
            line = [line for line in result.stderr.splitlines() if not line.startswith("warning: this CPU")]
            assert result.status == 2 and len(line) == 1, result.stderr
            assert re.match(rf"error: {checkpoints(tmp_path / script)[0]} was saved with --{flag} ", line[0])
            assert "new run with another --run_dir" in line[0]
        assert {file: file.stat().st_mtime_ns for file in checkpoints(tmp_path / script)} == before
    error = run_script(
        "01_single_gpu/train.py", *flags, *MEMORY, "--run_dir", tmp_path / "01_single_gpu", "--batch_size", 16
    ).error
    assert "8" in error and "16" in error


@pytest.mark.parametrize("lesson", ["01_single_gpu", "03_ddp", "05_fully_sharded"])
def test_a_finished_run_says_that_nothing_is_left_to_do(run_script: Script, tmp_path: Path, lesson: str) -> None:
    flags = [*ONE_EPOCH, *OF_LESSON[lesson], "--run_dir", tmp_path, "--resume", "true"]
    assert run_script(f"{lesson}/train.py", *flags).status == 0
    before = (tmp_path / "summary.json").read_text()
    for more in ([], ["--monitor", "true"], ["--trace", "true"]):
        again = run_script(f"{lesson}/train.py", *flags, *more)
        assert again.status == 0, again.stderr
        assert "nothing is left to do: --epochs is 1\n" in again.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == json.loads(before)["epochs"]


def test_a_new_start_sets_the_earlier_run_aside(run_script: Script, tmp_path: Path) -> None:
    flags = [*ONE_EPOCH, *MEMORY, "--run_dir", tmp_path]
    mine = tmp_path / "results.txt"
    mine.write_text("mine")
    for number in (0, 1, 2):
        earlier = {file.name: file.read_bytes() for file in tmp_path.glob("checkpoint*")}
        assert run_script("01_single_gpu/train.py", *flags, "--seed", number).status == 0
        if number:
            kept = tmp_path / "earlier" / str(number)
            assert {file.name: file.read_bytes() for file in kept.glob("checkpoint*")} == earlier != {}
            assert (kept / "summary.json").exists()
    assert mine.read_text() == "mine"
    assert len(list(tmp_path.glob("events*"))) == 1


def test_a_folder_has_one_run_at_a_time(run_script: Script, user_environment: dict[str, str], tmp_path: Path) -> None:
    flags = [*ONE_EPOCH, *MEMORY, "--run_dir", tmp_path]
    fault = [REPOSITORY / "tests/with_fault.py", 0, STEP_BEGINS, 2, "SIGSTOP"]
    words = [quick_python.commands() / "python", *fault, "train.py", *flags, "--log_interval", 1]
    first = subprocess.Popen(
        [*map(str, words)], cwd=REPOSITORY / "01_single_gpu", env=user_environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert any("step 1/8" in line for line in first.stdout)  # it stops itself in its second step
        for more in ([], ["--resume", "true"], ["--benchmark", "true"]):
            error = run_script("01_single_gpu/train.py", *flags, *more).error
            assert error == f"another run writes to {tmp_path}; choose another --run_dir"
    finally:
        first.kill()
        first.wait()
    until = time.monotonic() + 60  # the folder is free as soon as the system has ended the first run
    while (again := run_script("01_single_gpu/train.py", *flags)).status != 0 and time.monotonic() < until:
        time.sleep(0.1)
    assert again.status == 0, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_and_the_output_ends_with_the_cause(
    rank: int, user_environment: dict[str, str], tmp_path: Path
) -> None:
    """Far sooner than after --timeout_minutes, here an hour."""
    fault = (rank, STEP_BEGINS, 3, "SIGKILL")
    done = LESSONS["03"].train(tmp_path, user_environment, "--timeout_minutes", 60, fault=fault)
    assert done.status != 0
    cause = done.stderr[done.stderr.index("Root Cause (first observed failure)") :]
    assert re.search(rf"rank +: {rank} .*\n.*\(SIGKILL\)", cause)
    assert len(cause.splitlines()) < 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "event", "more"),
    [  # where rank 1 is suspended: in the group of all ranks, of a mesh (05 HSDP), and of those that save
        ("03", STEP_BEGINS, []),
        ("05", STEP_BEGINS, []),
        ("05", "torch.autograd.backward", ["--shard", "none"]),
        ("05 HSDP", "torch.autograd.backward", []),
        ("05", "torch.distributed.checkpoint.save", []),
        ("05 async", "torch.distributed.checkpoint.async_save", []),
    ],
)
def test_a_suspended_rank_ends_the_job_after_the_timeout(
    name: str, event: str, more: list[object], user_environment: dict[str, str], tmp_path: Path
) -> None:
    fault = (1, event, 1 if "checkpoint" in event else 3, "SIGSTOP")
    done = LESSONS[name].train(tmp_path, user_environment, "--timeout_minutes", 0.1, *more, fault=fault)
    assert done.status != 0
    cause = done.stderr[done.stderr.index("Root Cause (first observed failure)") :]
    # gloo's two messages: of a receive, and of a connection that one has closed before
    assert re.search("Timed out waiting 6000ms|Application timeout caused pair closure", done.stderr), done.stderr
    assert re.search(r"rank +: [^1] ", cause), cause


@pytest.mark.parametrize("lesson", ["01_single_gpu", "03_ddp", "05_fully_sharded"])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    run_script: Script, tmp_path: Path, lesson: str
) -> None:
    flags = [*ONE_EPOCH, *OF_LESSON[lesson], "--run_dir", tmp_path, "--resume", "true"]
    for interval, found in ((1, r"step \d of epoch 1"), (100, r"step \d of epoch 1")):
        error = run_script(
            f"{lesson}/train.py", *flags, "--optimizer", "sgd", "--lr", 1e18, "--log_interval", interval
        ).error
        assert re.match(rf"the loss is not finite at {found}: try a lower --lr", error)
        assert not checkpoints(tmp_path)
