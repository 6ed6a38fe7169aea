"""Lesson 04 as its user runs it: precision, options, ranks, resuming, CUDA graph, and what is refused."""

import itertools
import json
import re
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workshop.checks
from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import start_ranks
from workshop import hardware, seeds
from workshop.errors import UserError
from workshop.ranks import Ranks

FOLDER = REPOSITORY / "04_mixed_precision"
LESSON = load_script(FOLDER)
CPU = torch.device("cpu")
TINY = ["--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml"]
SHORT = ["--limit_train", 64, "--limit_val", 33, "--loader", "memory", "--num_workers", 0, "--batch_size", 32]
UNET = [*TINY, "--unet_width", 4, "--crop_size", 8, "--train_crops", 32, "--val_crops", 17]
WORKLOADS = {"mnist": SHORT, "cifar10": ["--config", "../configs/cifar10.yaml", *SHORT], "nbody": UNET}


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "04_mixed_precision/train.py")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def losses_of(folder: Path) -> list[float]:
    return [epoch[name] for epoch in summary_of(folder)["epochs"] for name in ("train_loss", "val_loss")]


# Precision and options.


@pytest.mark.parametrize(("computes", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_bf16_where_the_device_computes_in_it(
    train: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, computes: bool, chosen: str
) -> None:
    monkeypatch.setattr(workshop.checks, "computes_in", lambda *_: computes)
    result = train(*UNET, "--epochs", 1, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert result.stdout.startswith(f"--precision auto: {chosen}, because the CPU ")
    assert summary_of(tmp_path)["config"]["precision"] == chosen


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("mnist", ["--precision", "bf16", "--channels_last", "true"]),
        ("cifar10", ["--precision", "fp16", "--fused", "true"]),
        ("nbody", ["--precision", "bf16", "--channels_last", "true", "--fused", "true"]),
    ],
)
def test_options_hardly_change_the_loss(train: Script, workload: str, options: list[str], tmp_path: Path) -> None:
    flags = [*WORKLOADS[workload], "--epochs", 1, "--seed", 3]
    for name, more in (("plain", ["--precision", "fp32"]), ("options", options)):
        result = train(*flags, *more, "--run_dir", tmp_path / name)
        assert result.status == 0, result.stderr
    plain, with_options = losses_of(tmp_path / "plain"), losses_of(tmp_path / "options")
    assert with_options == pytest.approx(plain, rel=0.02)
    assert with_options != plain
    (epoch,) = summary_of(tmp_path / "options")["epochs"]
    assert (epoch["val_accuracy"] is None) == (workload == "nbody")


def test_products_have_16_bits_and_all_the_rest_has_32() -> None:
    model = torch.nn.Linear(8, 10)
    config = LESSON.Config(precision="bf16")
    optimizer = LESSON.make_optimizer(config, model)
    seen = []
    model.register_forward_hook(lambda _, __, outputs: seen.append(outputs.dtype))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    training = LESSON.Training(model, model, optimizer, None, scaler, Ranks(device=torch.device("cpu")))
    loss = LESSON.train_step(config, training, torch.randn(4, 8), torch.arange(4))
    state = optimizer.state[model.weight]
    kept = (loss, model.weight, model.weight.grad, state["exp_avg"], state["exp_avg_sq"])
    assert seen == [torch.bfloat16]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_both_switches_for_tf32_follow_the_precision() -> None:
    try:
        for precision in ("fp32", "tf32", "bf16", "tf32", "fp32"):
            LESSON.set_precision(precision, cudnn_benchmark=precision == "bf16")
            switches = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
            assert switches == ((True, True) if precision == "tf32" else (False, False))
            assert torch.backends.cudnn.benchmark == (precision == "bf16")
    finally:
        LESSON.set_precision("fp32", cudnn_benchmark=False)


def test_the_weights_of_a_checkpoint_are_channels_last(train: Script, tmp_path: Path) -> None:
    result = train(*UNET, "--epochs", 1, "--channels_last", "true", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    weight = torch.load(tmp_path / "checkpoint.pt")["model"]["down.1.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()


def test_a_fused_sgd_whose_first_step_overflows_begins_without_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))  # what was in memory
    found = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))
        config = LESSON.Config(optimizer="sgd", lr=0.5, fused=fused)
        optimizer, scaler = LESSON.make_optimizer(config, torch.nn.ParameterList([weight])), torch.amp.GradScaler("cpu")
        for factor in (torch.inf, 0.125, 0.25):
            optimizer.zero_grad()
            scaler.scale((factor * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(weight.detach())
    assert torch.equal(*found)


# Ranks and resuming.


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "fp16"],
        pytest.param(["--compile", "default", "--precision", "fp32"], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_two_ranks_learn_what_one_does(
    train: Script, user_environment: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    flags = [*UNET, "--epochs", 1]
    assert train(*flags, *options[-2:], "--run_dir", tmp_path / "one").status == 0
    results = start_ranks(
        2, "train.py", *flags, *options, "--run_dir", tmp_path / "two", cwd=FOLDER, environment=user_environment
    )
    assert [result.status for result in results] == [0, 0], results[0].stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=5e-3)
    names = " ".join(torch.load(tmp_path / "two" / "checkpoint.pt")["model"])
    assert "_orig_mod" not in names and "module." not in names


def test_a_run_in_fp16_that_was_stopped_within_an_epoch_continues_with_its_scale(
    train: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [*UNET, "--global_batch_size", 4, "--precision", "fp16", "--epochs", 2, "--log_interval", 1]
    assert train(*flags, "--run_dir", tmp_path / "whole").status == 0
    seed, steps = seeds.seed_generators, itertools.count(1)

    def seed_and_stop(*arguments: Any) -> None:  # noqa: ANN401
        seed(*arguments)
        if next(steps) == 3:
            signal.raise_signal(signal.SIGUSR1)

    with monkeypatch.context() as patch:
        patch.setattr(seeds, "seed_generators", seed_and_stop)
        stopped = train(*flags, "--run_dir", tmp_path / "stopped")
    assert stopped.status == 0 and "--resume true continues after step 3\n" in stopped.stdout
    resumed = train(*flags, "--resume", "true", "--run_dir", tmp_path / "stopped")
    assert resumed.status == 0, resumed.stderr
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    whole, found = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "stopped"))
    assert whole["scaler"] == found["scaler"] and whole["scaler"]["_growth_tracker"] == 16
    assert all(torch.equal(weights, found["model"][name]) for name, weights in whole["model"].items())


def test_a_run_is_not_resumed_in_another_precision(
    train: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")  # else a CPU without bf16 gives a warning as well
    flags = [*UNET, "--run_dir", tmp_path]
    assert train(*flags, "--epochs", 1, "--precision", "fp32").status == 0
    error = train(*flags, "--epochs", 2, "--precision", "bf16", "--resume", "true").error
    assert "was saved with --precision fp32, but now it is bf16" in error


# The CUDA graph, as far as a machine without a GPU can show it.


def fake_graphs(patch: pytest.MonkeyPatch, graph: Callable, recording: Callable = nullcontext) -> None:
    """Let ``graph`` make what is replayed, and ``recording`` the context in which the step is recorded."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, stand_in in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": graph,
        "graph": lambda graph, stream, capture_error_mode: recording(),
    }.items():
        patch.setattr(torch.cuda, name, stand_in)


def test_a_graph_takes_each_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[float] = []
    replayed: list[float] = []
    fake_graphs(monkeypatch, lambda: SimpleNamespace(replay=lambda: replayed.append(graph.inputs.item())))
    graph = LESSON.GraphedStep()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        computed.append(inputs.item())
        return targets

    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, -1))  # what is recorded on
    losses = [graph.train(step, torch.tensor(float(n)), torch.tensor(-float(n))).item() for n in range(20)]
    assert computed == [*range(11), -1]
    assert replayed == list(range(11, 20))
    assert losses == [-n for n in range(20)]


@pytest.mark.parametrize("stopped", [False, True])
def test_the_graph_is_freed_before_the_process_group_is_destroyed(
    train: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    """Over NCCL, destroying waits for graphs."""

    class Graph:
        def replay(self) -> None:
            if stopped:
                signal.raise_signal(signal.SIGUSR1)

    alive, seen = weakref.WeakSet(), []

    def new_graph() -> Graph:
        graph = Graph()
        alive.add(graph)
        return graph

    fake_graphs(monkeypatch, new_graph)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # what the step is recorded on
    monkeypatch.setattr(workshop.checks, "check_compute_options", lambda *_: None)  # would ask for a GPU
    destroy = torch.distributed.destroy_process_group
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: (seen.append(len(alive)), destroy()))
    flags = ["--batch_size", 4, "--log_interval", 1, "--optimizer", "sgd", "--fused", "true", "--cuda_graph", "true"]
    result = train(*SHORT, *flags, "--precision", "fp32", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert ("--resume true continues after step 12\n" in result.stdout) == stopped
    assert seen == [0]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer's own step would need a GPU
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adadelta"])
def test_the_learning_rate_that_a_graph_reads_changes_in_place(name: str) -> None:
    config = LESSON.Config(optimizer=name, lr=0.5, fused=name == "sgd", cuda_graph=True)
    optimizer = LESSON.make_optimizer(config, torch.nn.Linear(2, 2))
    lr = optimizer.param_groups[0]["lr"]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)).step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == pytest.approx(0.25)


# What is refused, in one line.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
        (["--precision", "fp8"], "fp8"),
        (["--cuda_graph", "true"], "--cuda_graph true needs an NVIDIA GPU; this is the CPU"),
        (["--cudnn_benchmark", "true"], "--cudnn_benchmark true needs an NVIDIA GPU; this is the CPU"),
        (["--fused", "true", "--optimizer", "adadelta"], "PyTorch has no fused adadelta"),
        ([*TINY, "--crop_size", 18], "--crop_size 18 cannot be halved 2 times; take --crop_size 16, or a smaller"),
        ([*TINY, "--crop_size", 64], "--crop_size 64 is larger than the box"),
        (TINY[2:], "--crop_size 16 needs --dataset nbody, not mnist: give --config configs/unet3d.yaml"),
        ([*TINY, "--model", "resnet18"], "--dataset nbody holds volumes, and only --model unet3d"),
        (["--model", "unet3d"], "--model unet3d maps volumes to volumes: it needs --dataset nbody, not mnist"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(train: Script, flags: list, message: str) -> None:
    assert message in train(*flags).error


def test_without_a_compiler_one_line_says_so(train: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    error = train("--compile", "default").error
    assert "torch.compile does not work here: InvalidCxxCompiler: No working C++ compiler found; it needs" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"compile": "reduce-overhead"}, "--compile reduce-overhead makes CUDA graphs of its own"),
        ({"precision": "fp16"}, "with --optimizer adam and --precision fp16 needs --fused true"),
        ({"optimizer": "sgd"}, "with --optimizer sgd and --precision fp32 needs --fused true"),
        ({"loader": "dali"}, "use --loader device"),
        ({"batch_size": 48}, "100 samples leave a last batch of 4; use --limit_train 96"),
    ],
    ids=str,
)
def test_what_a_cuda_graph_cannot_do_is_refused(flags: dict, message: str) -> None:
    gpu = torch.device("cuda")
    flags = {"precision": "fp32", "batch_size": 25} | flags
    with pytest.raises(UserError, match=re.escape(message)):
        LESSON.check_cuda_graph(LESSON.Config(**flags), Ranks(device=gpu), num_samples=100)
    fine = LESSON.Config(batch_size=25, precision="fp16", fused=True)
    LESSON.check_cuda_graph(fine, Ranks(device=gpu, world_size=2), num_samples=101)  # the last sample is left out


def test_what_an_old_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    gpu = SimpleNamespace(type="cuda")
    for precision, advice in (("tf32", "this is an old GPU"), ("bf16", "this is an old GPU: try --precision fp16")):
        with pytest.raises(UserError, match=f"compute capability 8.0 or newer; {advice}"):
            workshop.checks.choose_precision(precision, gpu)
    assert workshop.checks.choose_precision("auto", gpu) == "fp32"
