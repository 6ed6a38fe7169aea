"""Lesson 04 as its user runs it: every option that a CPU has trains every workload; the others are refused."""

import json
import os
import re
import runpy
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import REPOSITORY, Script
from measure import trivial_loss
from ranks import start_ranks
from workshop.commandline import load_config
from workshop.config import ComputeFlags
from workshop.distributed.ranks import ONE_PROCESS, Ranks
from workshop.errors import UserError
from workshop.loaders import build_loaders
from workshop.loaders.order import EpochOrder
from workshop.measuring.launching import load_script
from workshop.models import build_model
from workshop.models.unet3d import UNet3D
from workshop.run import Run
from workshop.run.checkpoint import identity
from workshop.run.progress import Progress
from workshop.signals import STOP_SIGNALS
from workshop.step.graph import StepGraph, require_one_shape
from workshop.step.optimizers import build_optimizer, restore_optimizer
from workshop.step.precision import choose_memory_format, require_options, set_up_device

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LESSON = REPOSITORY / "04_mixed_precision"
Config = load_script(LESSON).Config
TINY = ["--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml"]
SHORT = ["--limit_train", 64, "--limit_val", 33, "--loader", "memory", "--num_workers", 0, "--batch_size", 32]
MNIST = [*SHORT]
CIFAR = ["--config", "../configs/cifar10.yaml", *SHORT]
UNET = [*TINY, "--width", 4, "--crop_size", 8, "--train_crops", 32, "--val_crops", 17, "--global_batch_size", 16]
WORKLOADS = {"mnist": MNIST, "cifar10": CIFAR, "nbody": UNET}


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "04_mixed_precision/train.py")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def losses_of(folder: Path) -> list[float]:
    return [epoch[name] for epoch in summary_of(folder)["epochs"] for name in ("train_loss", "val_loss")]


def test_its_readme_shows_all_that_changed() -> None:
    hunks = runpy.run_path(str(REPOSITORY / "results" / "render.py"))["hunks"]("04_mixed_precision", "03_ddp")
    readme = (LESSON / "README.md").read_text()
    assert [hunk for hunk in hunks if readme.count(hunk) != 1] == []


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "bf16", "--channels_last", "true"],
        ["--precision", "fp16", "--fused", "true"],
    ],
    ids=" ".join,
)
def test_options_of_a_cpu_hardly_change_the_loss(
    train: Script, workload: str, options: list[str], tmp_path: Path
) -> None:
    flags = [*WORKLOADS[workload], "--epochs", 1, "--seed", 3]
    for name, more in (("plain", []), ("options", options)):
        result = train(*flags, *more, "--run_dir", tmp_path / name)
        assert result.status == 0, result.stderr
    plain, with_options = losses_of(tmp_path / "plain"), losses_of(tmp_path / "options")
    assert with_options == pytest.approx(plain, rel=0.02)
    assert with_options != plain
    (epoch,) = summary_of(tmp_path / "options")["epochs"]
    assert (epoch["val_accuracy"] is None) == (workload == "nbody")


def test_the_fast_configuration_learns_as_well(train: Script, tmp_path: Path) -> None:
    configs = ["--config", "../configs/mnist.yaml", "--config", "../configs/mnist_fast.yaml"]
    result = train(*configs, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert summary_of(tmp_path)["epochs"][0]["val_accuracy"] > 0.7


def test_the_tiny_unet_beats_a_copy_twice_over(train: Script, data_dir: Path, tmp_path: Path) -> None:
    flags = [*TINY, "--limit_train", 480, "--epochs", 1]
    for precision in ("fp32", "bf16"):
        result = train(*flags, "--precision", precision, "--run_dir", tmp_path / precision)
        assert result.status == 0, result.stderr
    fp32, bf16 = (losses_of(tmp_path / precision)[-1] for precision in ("fp32", "bf16"))
    files = [str(REPOSITORY / "configs" / name) for name in ("unet3d.yaml", "unet3d_tiny.yaml")]
    config = load_config(Config, ["--config", files[0], "--config", files[1], "--data_dir", str(data_dir)])
    batches = list(build_loaders(config, CPU)[1])
    trivial = trivial_loss(*(torch.cat(parts) for parts in zip(*batches, strict=True))).item()
    assert fp32 < trivial / 2
    assert bf16 == pytest.approx(fp32, rel=0.05)


def test_every_loader_has_the_same_cubes_for_the_unet(train: Script, tmp_path: Path) -> None:
    losses = {}
    for loader in ("memory", "map", "device", "dali"):
        result = train(*UNET, "--epochs", 1, "--precision", "bf16", "--loader", loader, "--run_dir", tmp_path / loader)
        assert result.status == 0, result.stderr
        losses[loader] = losses_of(tmp_path / loader)
    assert all(found == pytest.approx(losses["memory"], rel=1e-3) for found in losses.values())


class Stopped(Exception):
    """The run was stopped from outside."""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    train: Script, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*UNET, "--precision", precision, "--fused", "true", "--epochs", 2]
    assert train(*flags, "--run_dir", tmp_path / "whole").status == 0
    save = Run.save

    def save_and_stop(run: Run) -> None:
        save(run)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save_and_stop)
        with pytest.raises(Stopped):
            train(*flags, "--run_dir", tmp_path / "stopped")
    assert train(*flags, "--resume", "true", "--run_dir", tmp_path / "stopped").status == 0
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    whole, stopped = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "stopped"))
    assert whole["scaler"] == stopped["scaler"]
    assert bool(whole["scaler"]) == (precision == "fp16")
    if precision == "fp16":
        assert whole["scaler"]["_growth_tracker"] == 4  # steps of both epochs
    for name, weights in whole["model"].items():
        assert torch.equal(weights, stopped["model"][name])


def test_a_resumed_run_in_fp16_needs_a_scaler_in_its_checkpoint(train: Script, tmp_path: Path) -> None:
    assert train(*UNET, "--epochs", 1, "--run_dir", tmp_path).status == 0
    result = train(*UNET, "--epochs", 2, "--precision", "fp16", "--resume", "true", "--run_dir", tmp_path)
    assert result.status == 2
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("warning: "))  # of fp16 on this CPU
    assert line.startswith("error: ") and "precision is fp32 there and fp16 here" in line


def test_a_resumed_run_computes_as_its_own_flags_say(train: Script, tmp_path: Path) -> None:
    assert train(*MNIST, "--epochs", 1, "--fused", "true", "--run_dir", tmp_path).status == 0
    result = train(*MNIST, "--epochs", 2, "--channels_last", "true", "--resume", "true", "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["optimizer"]["param_groups"][0]["fused"] is None
    assert saved["optimizer"]["state"][2]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert saved["scaler"] == {}


STOP_AFTER_AN_EPOCH = """
import runpy, sys
from workshop.run import Run
save = Run.save
def save_and_stop(run):
    save(run)
    import os
    os._exit(0)
Run.save = save_and_stop
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_compiled_ranks_resume_and_learn_what_one_rank_does(
    train: Script, user_environment: dict[str, str], tmp_path: Path
) -> None:
    flags = [*CIFAR, "--limit_val", 32, "--epochs", 2]
    assert train(*flags, "--run_dir", tmp_path / "one").status == 0
    flags = [*flags, "--batch_size", 16, "--compile", "default", "--run_dir", tmp_path / "two"]
    start = partial(start_ranks, 2, cwd=LESSON, environment=user_environment)
    stopped = start("-c", STOP_AFTER_AN_EPOCH, *flags)
    assert [result.status for result in stopped] == [0, 0], stopped[0].stderr
    assert len(summary_of(tmp_path / "two")["epochs"]) == 1
    resumed = start("train.py", *flags, "--resume", "true")
    assert [result.status for result in resumed] == [0, 0], resumed[0].stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-3)
    assert "_orig_mod" not in " ".join(torch.load(tmp_path / "two" / "checkpoint.pt")["model"])


def test_two_ranks_of_the_unet_learn_what_one_does(
    train: Script, user_environment: dict[str, str], tmp_path: Path
) -> None:
    flags = [*UNET, "--epochs", 1, "--precision", "fp16"]
    assert train(*flags, "--run_dir", tmp_path / "one").status == 0
    results = start_ranks(
        2, "train.py", *flags, "--run_dir", tmp_path / "two", cwd=LESSON, environment=user_environment
    )
    assert [result.status for result in results] == [0, 0], results[0].stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
        (["--precision", "fp8"], "--precision takes one of 'fp32', 'tf32', 'bf16', 'fp16', got 'fp8'"),
        (["--cuda_graph", "true"], "--cuda_graph true needs an NVIDIA GPU; this is the CPU"),
        (["--cudnn_benchmark", "true"], "--cudnn_benchmark true needs an NVIDIA GPU; this is the CPU"),
        (["--compile", "fast"], "--compile takes one of 'off', 'default', 'reduce-overhead', 'max-autotune'"),
        (["--fused", "true", "--optimizer", "adadelta"], "PyTorch has no fused adadelta"),
        ([*TINY, "--crop_size", 18], "--crop_size 18 cannot be halved 2 times; take --crop_size 16, or --depth 1"),
        ([*TINY, "--crop_size", 64], "--crop_size 64 is larger than the box"),
        (TINY[2:], "--crop_size 16 needs --dataset nbody, not mnist; configs/unet3d.yaml says so"),
        ([*TINY, "--model", "resnet18"], "--dataset nbody holds volumes, and only --model unet3d"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, flags: list, message: str) -> None:
    result = train(*flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_what_compiles_in_other_processes_leaves_stop_signals_to_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the trial starts them; they inherit what is blocked."""
    status = []

    def compile_elsewhere(function: Callable) -> Callable:
        status.append(subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True).stdout)
        return function

    monkeypatch.setattr(torch, "compile", compile_elsewhere)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    require_options(ComputeFlags(compile="default"), CPU)
    blocked = int(status[0].split()[1], base=16)
    assert all(blocked >> number - 1 & 1 for number in STOP_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_without_a_compiler_one_line_says_so(train: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    result = train("--compile", "default")
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert "torch.compile does not work here: InvalidCxxCompiler: No working C++ compiler found; it needs" in line


class FakeGPU:
    """A device that looks like a GPU to whoever asks what it can do."""

    type = "cuda"


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    return FakeGPU()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"precision": "tf32"}, "compute capability 8.0 or newer; this is an old GPU"),
        (
            {"precision": "bf16"},
            "compute capability 8.0 or newer; this is an old GPU: try --precision fp16, as",
        ),
        ({"cuda_graph": True, "compile": "reduce-overhead"}, "--compile reduce-overhead makes CUDA graphs of its own"),
        ({"cuda_graph": True, "precision": "fp16"}, "with --precision fp16 needs --fused true"),
    ],
)
def test_what_a_gpu_lacks_or_what_excludes_another_is_refused(old_gpu: FakeGPU, flags: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        require_options(ComputeFlags(**flags), old_gpu)
    require_options(ComputeFlags(cuda_graph=True, precision="fp16", fused=True), old_gpu)


def test_a_cuda_graph_is_refused_with_dali(old_gpu: FakeGPU) -> None:
    with pytest.raises(UserError, match=r"^--cuda_graph true does not go with --loader dali: .*; use --loader device$"):
        require_options(Config(cuda_graph=True, loader="dali"), old_gpu)
    require_options(Config(cuda_graph=True, loader="device"), old_gpu)
    require_options(Config(loader="dali"), old_gpu)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd", {"capturable": True}, "--cuda_graph true with --optimizer sgd needs --fused true"),
        ("adadelta", {"fused": True}, "--fused true: PyTorch has no fused adadelta; choose another --optimizer"),
    ],
)
def test_what_an_optimizer_lacks_is_refused(optimizer: str, options: dict[str, bool], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        build_optimizer(Config(optimizer=optimizer), torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("samples", "ranks", "rest"), [(100, 1, 36), (64, 1, 0), (130, 2, 2), (129, 2, 0), (140, 2, 12)]
)
def test_a_graph_wants_batches_of_one_shape(samples: int, ranks: int, rest: int) -> None:
    sampler = EpochOrder(samples, 64 // ranks, Ranks(world_size=ranks), seed=1, shuffle=True)
    if rest:
        message = f"{samples} samples leave a last batch of {rest}; use --limit_train {samples - rest}"
        with pytest.raises(UserError, match=re.escape(message)):
            require_one_shape(sampler)
    else:
        require_one_shape(sampler)
        assert {len(batch) for batch in sampler.batches()} == {64 // ranks}


def test_without_a_graph_each_step_is_made_as_it_comes() -> None:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (inputs - targets).sum()

    graph = StepGraph(False, EpochOrder(100, 64, ONE_PROCESS, seed=1, shuffle=True))
    assert graph.around(step) is step
    with graph.on_its_stream():
        assert graph.around(step)(torch.ones(3), torch.zeros(3)) == 3


def pretend_graphs(patch: pytest.MonkeyPatch, graph: Callable, record: Callable = nullcontext) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, stand_in in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": graph,
        "graph": lambda graph, stream, capture_error_mode: record(),
    }.items():
        patch.setattr(torch.cuda, name, stand_in)


def test_a_graph_takes_each_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would do is only noted here: which batches are made as they come, and which the replays find."""
    computed: list[float] = []
    replayed: list[float] = []
    recording: list[bool] = []

    @contextmanager
    def record(*_: object, **__: object) -> Iterator[None]:
        recording.append(True)
        yield
        recording.append(False)

    recorded = SimpleNamespace(replay=lambda: replayed.append(graph.inputs.item()))
    pretend_graphs(monkeypatch, lambda: recorded, record)
    graph = StepGraph(True, EpochOrder(64, 1, ONE_PROCESS, seed=1, shuffle=True))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not (recording and recording[-1]):
            computed.append(inputs.item())
        return targets

    train_step = graph.around(step)
    losses = [train_step(torch.tensor(float(n)), torch.tensor(-float(n))).item() for n in range(20)]
    assert (computed, replayed) == ([float(n) for n in range(11)], [float(n) for n in range(11, 20)])
    assert recording == [True, False]
    assert losses == [-float(n) for n in range(20)]


class GraphThatIsStopped:
    """A graph that receives SIGTERM with its first replay."""

    def replay(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_stopped_lets_go_of_its_graph_before_the_ranks_part(
    train: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parting over NCCL waits for graphs, and the traceback of the stop still holds what train.py called."""
    alive = weakref.WeakSet()
    seen = []

    def new_graph() -> GraphThatIsStopped:
        graph = GraphThatIsStopped()
        alive.add(graph)
        seen.append(len(alive))
        return graph

    pretend_graphs(monkeypatch, new_graph)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # what the step is recorded on
    monkeypatch.setattr("workshop.step.precision.require_options", lambda *_: None)
    part = torch.distributed.destroy_process_group
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: (seen.append(len(alive)), part()))
    result = train(*SHORT, "--batch_size", 4, "--optimizer", "sgd", "--fused", "true", "--cuda_graph", "true")
    assert result.status == 0, result.stderr
    assert "told to stop by SIGTERM: saved after step 12 of epoch 1" in result.stdout
    assert seen == [1, 0]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer's own step would need a GPU
def test_the_rate_of_a_capturable_optimizer_changes_in_place() -> None:
    """A graph reads the learning rate where it was when recorded."""
    model = torch.nn.Linear(2, 2)
    for name in ("adam", "adamw", "sgd", "adadelta"):
        optimizer = build_optimizer(Config(optimizer=name, lr=0.5), model, fused=name == "sgd", capturable=True)
        (group,) = optimizer.param_groups
        rate = group["lr"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        assert group.get("capturable", True) is True
        scheduler.step()
        assert group["lr"] is rate
        assert rate == pytest.approx(0.25)


class Operations(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):  # noqa: ANN204
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_writes_the_rate_of_a_graph_and_multiplies_nothing_there() -> None:
    """On a GPU each operation is a kernel; torch keeps a copy of the rate for those who ask for the last one."""
    optimizer = build_optimizer(Config(lr=0.5), torch.nn.Linear(2, 2), capturable=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with Operations() as operations:
        scheduler.step()
    assert operations.names == ["aten.fill_.Scalar", "aten.clone.default"]


def test_a_resumed_run_goes_on_with_the_tensor_that_a_graph_reads() -> None:
    config = Config(lr=0.25)
    optimizer = build_optimizer(config, torch.nn.Linear(2, 2), capturable=True)
    (group,) = optimizer.param_groups
    rate = group["lr"]
    saved = {"state": {}, "param_groups": [dict(group, params=[0, 1], lr=torch.tensor(0.5))]}
    progress = Progress(config, CPU, ONE_PROCESS, Path("none"), print)
    progress._parts = {"optimizer": optimizer}
    run = {
        "is": identity(config, ONE_PROCESS, progress._parts),
        "lr": 1.0,
        "epochs": [],
        "steps": 0,
        "step": 0,
        "ranks": [],
    }
    progress._restore({"optimizer": saved, "run": run}, "a checkpoint")
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_a_first_step_that_overflows_leaves_no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))  # what lay in memory
    found = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = build_optimizer(Config(optimizer="sgd", lr=0.5), torch.nn.ParameterList([weight]), fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        for factor in (torch.inf, 0.125, 0.25):
            optimizer.zero_grad()
            scaler.scale((factor * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_momentum_that_a_checkpoint_lacks_is_none() -> None:
    """As that of a run all of whose steps have overflowed."""
    model = torch.nn.Linear(2, 2)
    saved = build_optimizer(Config(optimizer="sgd"), model).state_dict()
    optimizer = build_optimizer(Config(optimizer="sgd"), model, fused=True)
    restore_optimizer(optimizer, saved, factor=1.0)
    for weights in model.parameters():
        assert torch.equal(optimizer.state[weights]["momentum_buffer"], torch.zeros_like(weights))


def read_switches() -> tuple[object, ...]:
    """Read all that PyTorch offers to ask for TF32; none of these may raise an error."""
    with torch.backends.cudnn.flags(enabled=False):  # also reads the switches, to restore them afterwards
        pass
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
    )


def test_switches_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workshop.step.precision.require_options", lambda *_: None)
    exact = (False, False, "highest", "ieee", "none", "none")  # none: as for the whole backend, where it is none, too
    try:
        for precision in ("fp32", "tf32", "bf16", "tf32", "fp16", "fp32"):
            set_up_device(ComputeFlags(precision=precision, cudnn_benchmark=precision == "bf16"), CPU)
            assert read_switches() == ((True, True, "high", "tf32", "tf32", "tf32") if precision == "tf32" else exact)
            assert torch.backends.cudnn.benchmark == (precision == "bf16")
        assert torch.backends.cudnn.fp32_precision == torch.backends.fp32_precision == "none"
    finally:
        set_up_device(ComputeFlags(), CPU)


def test_channels_last_reaches_the_weights() -> None:
    config = Config(dataset="nbody", model="unet3d", width=2, depth=1)
    model = build_model(config).to(memory_format=choose_memory_format(channels_last=True, volumes=True))
    assert isinstance(model, UNet3D)
    assert model.down[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not model.down[0].weight.is_contiguous()
    assert choose_memory_format(channels_last=True, volumes=False) == torch.channels_last
    for volumes in (False, True):
        assert choose_memory_format(channels_last=False, volumes=volumes) == torch.contiguous_format
