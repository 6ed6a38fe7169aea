"""Lesson 03 as its user runs it: one rank or many learn the same; a mistake is one line and ends all ranks."""

import ast
import json
import math
import runpy
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from conftest import REPOSITORY, Script
from ranks import free_port, start_ranks
from workshop.run import Run

pytestmark = pytest.mark.slow

LESSON = REPOSITORY / "03_ddp"
SHORT = ["--limit_train", 320, "--limit_val", 101, "--loader", "memory", "--num_workers", 0]
CIFAR = ["--config", "../configs/cifar10.yaml", *SHORT, "--epochs", 2, "--batch_size", 32]  # its model has no dropout


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "03_ddp/train.py")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def script_of(lesson: str) -> str:
    return (REPOSITORY / lesson / "train.py").read_text()


@pytest.mark.parametrize(
    ("before", "lesson", "limit"),
    [
        ("01_single_gpu", "02_dataparallel", 24),
        ("01_single_gpu", "03_ddp", 200),
        ("03_ddp", "04_mixed_precision", 290),
        ("04_mixed_precision", "05_fully_sharded", 380),
    ],
)
def test_a_lesson_differs_from_the_one_before_by_what_it_teaches(
    tmp_path: Path, before: str, lesson: str, limit: int
) -> None:
    """Lines taken away and lines added, blank ones and those of the docstring left out."""
    for name in (before, lesson):
        _, _, code = script_of(name).split('"""', 2)
        (tmp_path / name).write_text("".join(line for line in code.splitlines(keepends=True) if line.strip()))
    changes = subprocess.run(["diff", before, lesson], cwd=tmp_path, capture_output=True, text=True).stdout
    changed = [line for line in changes.splitlines() if line.startswith(("<", ">"))]
    assert 0 < len(changed) <= limit


@pytest.mark.parametrize(
    ("function", "lessons"),
    [
        ("lr_factor", ("03_ddp", "04_mixed_precision")),
        ("lr_factor", ("04_mixed_precision", "05_fully_sharded")),
        ("ranks_from_env", ("03_ddp", "04_mixed_precision")),
        ("ranks_from_env", ("04_mixed_precision", "05_fully_sharded")),
        ("batch_size_per_rank", ("03_ddp", "04_mixed_precision")),
        ("batch_size_per_rank", ("04_mixed_precision", "05_fully_sharded")),
        ("main", ("03_ddp", "04_mixed_precision")),
        ("main", ("04_mixed_precision", "05_fully_sharded")),
        *(
            (name, ("04_mixed_precision", "05_fully_sharded"))
            for name in ("make_loader", "make_model", "loss_function")
        ),
        ("set_precision", ("04_mixed_precision", "05_fully_sharded")),
        ("make_loader", ("01_single_gpu", "02_dataparallel")),
        ("make_optimizer", ("01_single_gpu", "02_dataparallel")),
        ("make_optimizer", ("01_single_gpu", "03_ddp")),
        ("train_one_epoch", ("01_single_gpu", "02_dataparallel")),
        ("evaluate", ("01_single_gpu", "02_dataparallel")),
    ],
)
def test_what_lessons_repeat_on_purpose_is_the_same_in_both(function: str, lessons: tuple[str, str]) -> None:
    one, other = (body_of(function, script_of(lesson)) for lesson in lessons)
    assert one == other


def body_of(function: str, script: str) -> str:
    """The text of a function without its signature, in which the type of the model may differ."""
    (found,) = (node for node in ast.parse(script).body if getattr(node, "name", None) == function)
    return "\n".join(script.splitlines()[found.body[0].lineno - 1 : found.end_lineno])


def test_two_ranks_learn_what_one_does(train: Script, user_environment: dict[str, str], tmp_path: Path) -> None:
    assert train(*CIFAR, "--global_batch_size", 64, "--run_dir", tmp_path / "one").status == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*CIFAR, "--log_interval", 5, "--trace", "true", "--run_dir", tmp_path / "two"]
    result = subprocess.run(
        list(map(str, [*command, "train.py", *flags])),
        cwd=LESSON,
        env=user_environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    one, two = summary_of(tmp_path / "one"), summary_of(tmp_path / "two")
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["global_batch_size"] == two["global_batch_size"] == 64
    for summary in (one, two):
        assert (summary["backend"], summary["backend_class"]) == ("gloo", "ProcessGroupGloo")
    assert len(two["epochs"]) == 2
    for a, b in zip(one["epochs"], two["epochs"], strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-4)
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-3)
    assert one["all_reduce_bytes_per_step"] == two["all_reduce_bytes_per_step"] == 4 * 62006
    assert result.stdout.count("all-reduce(s) per step, 0.25 MB") == 1
    assert result.stdout.count("epoch 1  train loss") == 1
    assert result.stdout.count("step 5/5") == 2  # once in each epoch
    names = sorted(file.name for file in (tmp_path / "two").iterdir() if not file.name.startswith("events."))
    traces = ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz", "trace.png"]
    assert [name for name in names if "trace" in name] == traces
    assert len(list((tmp_path / "two").glob("events.*"))) == 1


def test_ranks_agree_on_the_steps_of_a_benchmark(user_environment: dict[str, str], tmp_path: Path) -> None:
    flags = [*SHORT, "--benchmark", "true", "--batch_size", 8, "--benchmark_seconds", 0.1, "--run_dir", tmp_path]
    main, other = start_ranks(2, "train.py", *flags, cwd=LESSON, environment=user_environment)
    assert (main.status, other.status) == (0, 0), main.stderr
    assert "SYNTHETIC" in main.stdout
    assert other.stdout == ""
    assert json.loads((tmp_path / "throughput.json").read_text())["FULL"]["mean"] > 0


def test_without_communication_and_with_one_rank(train: Script, tmp_path: Path) -> None:
    result = train(*SHORT, "--sync_gradients", "false", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert "0 all-reduce(s) per step" in result.stdout
    assert summary_of(tmp_path)["all_reduces_per_step"] == 0


class Seen(Exception):
    """What was to be seen has been seen."""


@pytest.mark.parametrize("lesson", ["03_ddp", "04_mixed_precision"])
def test_flags_reach_distributed_data_parallel(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, lesson: str
) -> None:
    seen = {}
    init = DistributedDataParallel.__init__

    def see(model: DistributedDataParallel, *positional: object, **named: object) -> None:
        init(model, *positional, **named)
        seen.update(named)

    def stop(model: DistributedDataParallel, *_: object) -> None:  # the next thing that is done with it
        seen["forward_sync_buffers"] = model.broadcast_buffers
        raise Seen

    monkeypatch.setattr(DistributedDataParallel, "__init__", see)
    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", stop)
    flags = {"bucket_cap_mb": 2.5, "gradient_as_bucket_view": True, "static_graph": True, "forward_sync_buffers": False}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    with pytest.raises(Seen):
        run_script(f"{lesson}/train.py", *SHORT, *words)
    assert seen == flags


@pytest.mark.parametrize("lesson", ["03_ddp", "04_mixed_precision"])
def test_no_all_reduce_is_counted_where_throughput_is_measured(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, lesson: str
) -> None:
    hooks, measured = [], []
    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", lambda *hook: hooks.append(hook))
    monkeypatch.setattr(Run, "benchmark", lambda *works: measured.append(works))
    result = run_script(f"{lesson}/train.py", *SHORT, "--benchmark", "true")
    assert result.status == 0, result.stderr
    assert (len(hooks), len(measured)) == (0, 1)


def test_resume_continues_the_schedule(train: Script, tmp_path: Path) -> None:
    for more in (["--epochs", 1], ["--epochs", 2, "--resume", "true"]):
        assert train(*SHORT, *more, "--run_dir", tmp_path).status == 0
    epochs = summary_of(tmp_path)["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[1]["val_loss"] < epochs[0]["val_loss"]


def test_learning_rate() -> None:
    lesson = runpy.run_path(str(LESSON / "train.py"), run_name="lesson")
    config, factor = lesson["Config"], lesson["lr_factor"]

    def factors(batch: int = 64, **flags: object) -> list[float]:
        return [factor(config(**flags), batch, step, 100) for step in range(101)]

    plain = factors()
    assert plain[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert (plain[10], plain[55], plain[100]) == pytest.approx((1, 0.5, 0))
    assert factors(warmup=0.0)[0] == 1
    assert factors(batch=512) == plain
    assert factors(batch=512, lr_scaling="linear") == pytest.approx([8 * value for value in plain])
    assert factors(batch=512, lr_scaling="sqrt") == pytest.approx([math.sqrt(8) * value for value in plain])
    assert factors(batch=512, lr_scaling="linear", base_batch_size=512) == pytest.approx(plain)
    assert factor(config(warmup=0.99), 64, 1, 1) == pytest.approx(0)  # after the only step


@pytest.fixture
def port_in_use() -> str:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


TWO_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "WORKSHOP_RENDEZVOUS_SECONDS": "2"}


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ([], TWO_RANKS, "MASTER_ADDR is not set, so 2 ranks do not know where to connect"),
        ([], TWO_RANKS | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set, so 2 ranks do not know"),
        ([], TWO_RANKS | ADDRESS | {"MASTER_PORT": "many"}, "MASTER_PORT=many is no address"),
        ([], TWO_RANKS | ADDRESS | {"MASTER_PORT": "{free}"}, "rank 0 of 2 waited up to 2 s at 127.0.0.1:"),
        (
            [],
            TWO_RANKS | ADDRESS | {"MASTER_PORT": "{free}", "RANK": "1"},
            "rank 1 of 2 waited up to 2 s at 127.0.0.1:",
        ),
        ([], TWO_RANKS | ADDRESS | {"MASTER_PORT": "{used}"}, "is in use on this machine; export another MASTER_PORT"),
        (
            [],
            TWO_RANKS | {"RANK": "x"},
            "RANK is 'x', but it must be a number of at least 0; torchrun and srun set it",
        ),
        ([], TWO_RANKS | {"LOCAL_RANK": "0.5"}, "LOCAL_RANK is '0.5'"),
        ([], TWO_RANKS | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ([], TWO_RANKS | {"RANK": "-1"}, "RANK is '-1'"),
        ([], TWO_RANKS | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK is not set, but it must be a number"),
        ([], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0: ranks count from 0"),
        ([], TWO_RANKS | ADDRESS | {"MASTER_PORT": "{free}", "RANK": "2"}, "rank 2 of 2: ranks count from 0"),
        ([], TWO_RANKS | ADDRESS | {"MASTER_PORT": "{free}", "WORKSHOP_RENDEZVOUS_SECONDS": "x"}, "SECONDS=x: give a"),
        ([], {"SLURM_NTASKS": "4"}, "this job has 4 tasks, but only one was started"),
        (["--global_batch_size", 0], {}, "--global_batch_size must be at least 1, got 0"),
        (["--warmup", 1], {}, "--warmup is a share of all steps, from 0 to below 1, got 1"),
        (["--lr_scaling", "cubic"], {}, "--lr_scaling takes one of 'none', 'sqrt', 'linear', got 'cubic'"),
        (["--static_graph", "true", "--sync_gradients", "false"], {}, "--sync_gradients true"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    train: Script, port_in_use: str, flags: list, environment: dict[str, str], message: str
) -> None:
    ports = {"free": free_port(), "used": port_in_use}
    result = train(*flags, **{name: value.format(**ports) for name, value in environment.items()})
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global_batch_size", 65], "65 cannot be shared evenly by 2 ranks; 64 or 66 could"),
        (["--warmap", 0.2], "did you mean --warmup?"),
    ],
)
def test_a_mistake_of_all_ranks_is_reported_once(user_environment: dict[str, str], flags: list, message: str) -> None:
    results = start_ranks(2, "train.py", *flags, cwd=LESSON, environment=user_environment)
    assert [result.status for result in results] == [2, 2]
    (line,) = "".join(result.stderr for result in results).splitlines()
    assert message in line


def test_a_rank_that_stops_does_not_leave_the_others_waiting(user_environment: dict[str, str]) -> None:
    """A third rank is announced and never joins: the two that did end, each with one line."""
    environment = user_environment | {"WORKSHOP_RENDEZVOUS_SECONDS": "2"}
    results = start_ranks(2, "train.py", *SHORT, cwd=LESSON, environment=environment, announced=3)
    assert [result.status for result in results] == [2, 2]
    for rank, result in enumerate(results):
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: rank {rank} of 3 ")
