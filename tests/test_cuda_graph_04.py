"""Lesson 04's CUDA graph, as far as a machine without a GPU can show: what is recorded and replayed, when it ends."""

import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import REPOSITORY, Script
from fake_graphs import fake_graphs
from lab.launching import load_script
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler

pytestmark = pytest.mark.slow

LESSON = load_script(REPOSITORY / "04_mixed_precision")
CHECKS = sys.modules["checks"]
Config, make_optimizer = LESSON.Config, LESSON.make_optimizer
SHORT = ["--limit_train", 64, "--limit_val", 33, "--loader", "memory", "--num_workers", 0]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "04_mixed_precision/train.py")


@pytest.mark.parametrize(
    ("samples", "ranks", "rest"), [(100, 1, 36), (64, 1, 0), (130, 2, 2), (129, 2, 0), (140, 2, 12)]
)
def test_a_graph_needs_batches_of_one_shape(samples: int, ranks: int, rest: int) -> None:
    sampler = DistributedBatchSampler(samples, 64 // ranks, num_replicas=ranks, seed=1, shuffle=True)
    if rest:
        message = f"{samples} samples leave a last batch of {rest}; use --limit_train {samples - rest}"
        with pytest.raises(UserError, match=re.escape(message)):
            LESSON.check_one_shape(samples, sampler.global_batch_size, ranks)
    else:
        LESSON.check_one_shape(samples, sampler.global_batch_size, ranks)
        assert {len(batch) for batch in sampler.batches()} == {64 // ranks}


def test_a_last_batch_of_another_shape_is_refused_before_the_first_step(
    train: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_graphs(monkeypatch, lambda: pytest.fail("a graph was made"))
    monkeypatch.setitem(sys.modules, "checks", CHECKS)  # another lesson has a module of this name
    monkeypatch.setattr(CHECKS, "check_options", lambda *_: None)
    result = train(*SHORT, "--batch_size", 5, "--fused", "true", "--cuda_graph", "true")
    assert result.status == 2
    assert "64 samples leave a last batch of 4; use --limit_train 60" in result.stderr


def test_without_the_flag_there_is_no_graph(train: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs(monkeypatch, lambda: pytest.fail("a graph was made"))
    result = train(*SHORT, "--batch_size", 32)
    assert result.status == 0, result.stderr


def test_a_graph_takes_each_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake graph computes nothing: it logs which batches the eager steps got, and which the replays found."""
    computed: list[float] = []
    replayed: list[float] = []
    recording: list[bool] = []

    @contextmanager
    def record(*_: object, **__: object) -> Iterator[None]:
        recording.append(True)
        yield
        recording.append(False)

    recorded = SimpleNamespace(replay=lambda: replayed.append(graph.inputs.item()))
    fake_graphs(monkeypatch, lambda: recorded, record)
    graph = LESSON.GraphedStep()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not (recording and recording[-1]):
            computed.append(inputs.item())
        return targets

    losses = [graph.train(step, torch.tensor(float(n)), torch.tensor(-float(n))).item() for n in range(20)]
    assert (computed, replayed) == ([float(n) for n in range(11)], [float(n) for n in range(11, 20)])
    assert recording == [True, False]
    assert losses == [-float(n) for n in range(20)]


class GraphThatIsStopped:
    """A graph that receives SIGTERM with its first replay."""

    def replay(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_stopped_frees_its_graph_before_the_process_group_is_destroyed(
    train: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, destroying waits for graphs, and the traceback of the stop still refers to what train.py called."""
    alive = weakref.WeakSet()
    seen = []

    def new_graph() -> GraphThatIsStopped:
        graph = GraphThatIsStopped()
        alive.add(graph)
        seen.append(len(alive))
        return graph

    fake_graphs(monkeypatch, new_graph)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # what the step is recorded on
    monkeypatch.setitem(sys.modules, "checks", CHECKS)  # another lesson has a module of this name
    monkeypatch.setattr(CHECKS, "check_options", lambda *_: None)
    destroy = torch.distributed.destroy_process_group
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: (seen.append(len(alive)), destroy()))
    result = train(*SHORT, "--batch_size", 4, "--optimizer", "sgd", "--fused", "true", "--cuda_graph", "true")
    assert result.status == 0, result.stderr
    assert "stopped by SIGTERM: saved after step 12 of epoch 1" in result.stdout
    assert seen == [1, 0]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer's own step would need a GPU
def test_the_learning_rate_that_a_graph_reads_changes_in_place() -> None:
    """A graph reads the learning rate at the address where it was when recorded."""
    model = torch.nn.Linear(2, 2)
    for name in ("adam", "adamw", "sgd", "adadelta"):
        optimizer = make_optimizer(Config(optimizer=name, lr=0.5, fused=name == "sgd", cuda_graph=True), model)
        (group,) = optimizer.param_groups
        lr = group["lr"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        assert group.get("capturable", True) is True
        scheduler.step()
        assert group["lr"] is lr
        assert lr == pytest.approx(0.25)


class Operations(TorchDispatchMode):
    """Logs what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):  # noqa: ANN204
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_writes_the_learning_rate_of_a_graph_and_multiplies_nothing_on_the_device() -> None:
    """On a GPU each operation is a kernel; torch keeps a copy of the learning rate, which `get_last_lr` returns."""
    optimizer = make_optimizer(Config(lr=0.5, cuda_graph=True), torch.nn.Linear(2, 2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with Operations() as operations:
        scheduler.step()
    assert operations.names == ["aten.fill_.Scalar", "aten.clone.default"]
