"""All that a GPU does differently: its results against the CPU's, and against its own without an option."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import REPOSITORY, Train
from lab.launching import load_script
from lab.timing import measure
from lab.trace_table import trace_table
from workshop.commandline import load_config
from workshop.loaders.crops import cut
from workshop.profiling.timeline import read_rows

CONFIGS = REPOSITORY / "configs"
LESSON = load_script(REPOSITORY / "04_mixed_precision")
DIGITS = ["--limit_train", 640, "--limit_val", 128, "--num_workers", 1]
TINY = ["--config", CONFIGS / "unet3d.yaml", "--config", CONFIGS / "unet3d_tiny.yaml"]
UNET = [*TINY, "--unet_width", 16, "--train_crops", 256, "--val_crops", 32, "--loader", "device", "--epochs", 2]
"""16 steps an epoch: a graph is recorded in the 12th"""
GRAPH = [*UNET, "--precision", "bf16", "--fused", "true", "--channels_last", "true", "--cuda_graph", "true"]
LOADERS = {
    "mnist": ["map", "shards", "memory", "device", "dali"],
    "cifar10": ["map", "shards", "memory", "device", "dali"],
    "nbody": ["map", "memory", "device", "dali"],
}
PRECISIONS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""how far, relatively, the losses may be from the CPU's in fp32"""


def needs_library(loader: str) -> None:
    if loader == "shards":
        pytest.importorskip("webdataset")
    if loader == "dali":
        pytest.importorskip("nvidia.dali")


@pytest.mark.parametrize(
    ("name", "loader"), [(name, loader) for name, loaders in LOADERS.items() for loader in loaders]
)
def test_every_loader_gives_the_batches_that_it_gives_a_cpu(
    name: str, loader: str, data_dir: object, device: torch.device
) -> None:
    needs_library(loader)
    files = [CONFIGS / "unet3d.yaml", CONFIGS / "unet3d_tiny.yaml"] if name == "nbody" else []
    words = [word for file in files for word in ("--config", file)] or ["--dataset", name, "--batch_size", 32]
    words += ["--loader", loader, "--num_workers", 1, "--data_dir", data_dir]
    words += ["--train_crops", 64, "--batch_size", 16] if files else ["--limit_train", 128]
    config = load_config(LESSON.Config, [str(word) for word in words])
    for split in ("train", "val"):
        mine, theirs = (
            LESSON.make_loader(config, split, where, rank=0, world_size=1) for where in (device, torch.device("cpu"))
        )
        for both in (mine, theirs):
            both.batch_sampler.set_epoch(1)
        batches = 0
        for got, expected in zip(mine, theirs, strict=True):
            for tensor, reference in zip(got, expected, strict=True):
                assert tensor.dtype == reference.dtype
                torch.testing.assert_close(tensor.cpu(), reference, atol=2e-3 if loader == "dali" else 1e-5, rtol=0)
            batches += 1
        assert batches == len(mine)


@pytest.mark.parametrize("lesson", ["01_single_gpu", "02_dataparallel", "03_ddp"])
def test_the_first_lessons_train(lesson: str, train: Train, device: torch.device) -> None:
    done = train(lesson, *DIGITS, "--epochs", 2, "--monitor", "true")
    assert done.status == 0, done.stderr
    first, last = done.summary["epochs"]
    assert last["val_loss"] < first["val_loss"] < 2.5
    hardware, watched = done.summary["hardware"], done.summary["monitor"]
    assert hardware["device"] == device.type
    assert watched["failure"] is None
    if device.type == "cuda":
        assert hardware["gpus"] == torch.cuda.device_count() and hardware["driver"]
        assert watched["quantities"]["gpu_memory_bytes"]["max"] > 0
        assert "gpu" not in watched["left_out"], watched


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_what_a_cpu_learns(
    precision: str, train: Train, on_cpu: Train, device: torch.device
) -> None:
    if precision == "tf32" and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    done = train("04_mixed_precision", *UNET, "--precision", precision)
    assert done.status == 0, done.stderr
    assert done.losses == pytest.approx(on_cpu("04_mixed_precision", *UNET).losses, rel=PRECISIONS[precision])


def test_a_graph_learns_what_single_kernels_do_and_its_learning_rate_falls(train: Train) -> None:
    plain = train("04_mixed_precision", *GRAPH, "--cuda_graph", "false", run="plain")
    graph = train("04_mixed_precision", *GRAPH, run="graph")
    assert (plain.status, graph.status) == (0, 0), plain.stderr + graph.stderr
    assert graph.losses == pytest.approx(plain.losses, rel=5e-3)
    (group,) = graph.checkpoint["optimizer"]["param_groups"]
    assert float(group["lr"]) == pytest.approx(0, abs=1e-9)  # a cosine ends there


@pytest.mark.parametrize("stop", [3, 14, 20], ids="stopped in step {}".format)
def test_a_graph_goes_on_after_a_stop(stop: int, train: Train) -> None:
    whole = train("04_mixed_precision", *GRAPH, run="whole")
    stopped = train("04_mixed_precision", *GRAPH, stop=stop)
    assert stopped.status == 0, stopped.stderr
    assert "stopped by SIGTERM" in stopped.stdout
    resumed = train("04_mixed_precision", *GRAPH, "--resume", "true")
    assert resumed.status == 0, resumed.stderr
    assert resumed.losses == pytest.approx(whole.losses, rel=5e-3)


def test_a_run_without_a_graph_goes_on_with_one(train: Train) -> None:
    whole = train("04_mixed_precision", *GRAPH, run="whole")
    eager = [*UNET, "--precision", "bf16"]
    assert train("04_mixed_precision", *eager, stop=16).status == 0
    resumed = train("04_mixed_precision", *GRAPH, "--resume", "true")
    assert resumed.status == 0, resumed.stderr
    assert resumed.losses == pytest.approx(whole.losses, rel=2e-2)


def test_compiled_code_learns_what_single_kernels_do(train: Train) -> None:
    flags = [*UNET, "--precision", "bf16"]
    plain = train("04_mixed_precision", *flags, run="plain")
    compiled = train("04_mixed_precision", *flags, "--compile", "default", "--cuda_graph", "true", "--fused", "true")
    assert (plain.status, compiled.status) == (0, 0), plain.stderr + compiled.stderr
    assert compiled.losses == pytest.approx(plain.losses, rel=2e-2)
    assert compiled.summary["first_step_seconds"] > plain.summary["first_step_seconds"]


def test_a_benchmark_compiles_before_its_trials_although_the_last_batch_is_short(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_before = []

    def three_epochs(seconds: float, time_of: Callable, first: int) -> int:
        compiled_before.append(counters["stats"]["unique_graphs"])
        return 3 * 12

    counters.clear()
    monkeypatch.setattr("workshop.profiling.throughput.repeats_for", three_epochs)
    flags = ["--loader", "memory", "--batch_size", 50, "--limit_train", 12 * 50 + 40, "--compile", "default"]
    done = train("04_mixed_precision", *flags, "--benchmark", "true")
    assert done.status == 0, done.stderr
    assert json.loads((done.folder / "throughput.json").read_text())["FULL"]["mean"] > 0
    assert compiled_before[0] == counters["stats"]["unique_graphs"] > 0


def test_everything_at_once_on_digits(train: Train, device: torch.device) -> None:
    configs = ["--config", CONFIGS / "mnist.yaml", "--config", CONFIGS / "mnist_fast.yaml"]
    cudnn = ["--cudnn_benchmark", "true"] if device.type == "cuda" else []
    done = train("04_mixed_precision", *configs, *cudnn, "--cuda_graph", "true", "--epochs", 2)
    assert done.status == 0, done.stderr
    assert done.summary["epochs"][-1]["val_accuracy"] > 0.5


def test_a_trace_has_the_kernels(train: Train, device: torch.device) -> None:
    done = train("04_mixed_precision", *UNET, "--epochs", 1, "--trace", "true")
    assert done.status == 0, done.stderr
    file = done.folder / "rank0.pt.trace.json.gz"
    rows = read_rows(file)
    assert len(rows["forward"][0]) == len(rows["backward"][0]) == len(rows["optimizer"][0]) > 0
    if device.type == "cuda":
        assert len(rows["backward launches"][0]) == len(rows["backward"][0])
    found = trace_table(file)
    assert found["clock"] == ("GPU" if device.type == "cuda" else "CPU")
    assert found["steps"] > 0 and 0 < sum(row["share"] for row in found["rows"]) <= 1.0001


def test_one_rank_over_nccl_and_a_mistake_in_one_line(start: Train, device: torch.device) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = start("03_ddp", *DIGITS, **rank)
    assert done.status == 0, done.stderr
    assert done.summary["all_reduces_per_step"] == 2
    mistaken = start("03_ddp", *DIGITS, "--lr", 1e30, "--optimizer", "sgd", run="mistaken", **rank)
    assert mistaken.status == 2
    (line,) = mistaken.stderr.splitlines()
    assert line.startswith("error: the loss is not finite")


def test_a_first_step_that_overflows_leaves_no_momentum(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device=device))
    config = LESSON.Config(optimizer="sgd", lr=0.5, fused=True)
    optimizer = LESSON.make_optimizer(config, torch.nn.ParameterList([weight]))
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale((torch.inf * weight).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight.detach().cpu(), torch.ones(1000))
    assert not optimizer.state[weight]["momentum_buffer"].any()


# What only a GPU can show of measurements. None of these has run on a GPU yet.


@pytest.fixture
def comparison(data_dir: Path, tmp_path: Path) -> Callable[..., dict]:
    """Runs lesson 04's step-by-step comparison on a small U-Net, one configuration after the other; their figures."""

    def run(*configurations: str) -> dict[str, dict]:
        words = [*UNET[: UNET.index("--epochs")], "--batch_size", 16, "--data_dir", data_dir, "--out", tmp_path]
        words += ["--steps", 3, "--trials", 2, "--trial_seconds", 0.1, "--configuration"]
        found = {}
        for name in ("shared", *configurations):
            script = [sys.executable, "experiments/ladder.py", *map(str, words), name]
            done = subprocess.run(script, cwd=REPOSITORY / "04_mixed_precision", capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            if name != "shared":
                found[name] = json.loads((tmp_path / "configuration.json").read_text())
        return found

    return run


def test_configurations_are_compared_with_float64(comparison: Callable[..., dict]) -> None:
    found = comparison("fp32", "bf16")
    assert found["fp32"]["output_error"] < 1e-4 < found["bf16"]["output_error"] < 0.1
    assert all(row["samples_per_second"] > 0 for row in found.values())


def first_step_ms(benchmark: bool, heuristics_first: bool) -> float:
    """The milliseconds of the first step with ``cudnn.benchmark`` in a process of its own."""
    code = f"""
import time, torch
convolutions = torch.nn.Sequential(*(torch.nn.Conv3d(8, 8, 3, padding=1) for _ in range(3))).cuda()
def step(inputs):
    torch.cuda.synchronize()
    started = time.perf_counter()
    convolutions(inputs).sum().backward()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)
step(torch.randn(2, 8, 16, 16, 16, device="cuda"))  # loads cuDNN
inputs = torch.randn(2, 8, 32, 32, 32, device="cuda")
if {heuristics_first}:
    step(inputs)
torch.backends.cudnn.benchmark = {benchmark}
print(step(inputs))
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_cudnn_searches_only_in_a_process_of_its_own(device: torch.device) -> None:
    """The reason why each configuration has one: a search takes far longer than the steps it is to speed up."""
    if device.type == "cpu":
        pytest.skip("a CPU has no cuDNN")
    searched = first_step_ms(benchmark=True, heuristics_first=False)
    assert first_step_ms(benchmark=True, heuristics_first=True) < searched / 2


@pytest.mark.parametrize("cells", [32, 64])
def test_cubes_cut_on_a_gpu_are_those_cut_on_a_cpu(cells: int, device: torch.device) -> None:
    for channels in (4, 5):
        box = torch.randn(channels, cells, cells, cells)
        corners, symmetries = torch.randint(cells, (96, 3)), torch.arange(96) % 48
        found = cut(box.to(device), corners, symmetries, 24)
        assert torch.equal(found.cpu(), cut(box, corners, symmetries, 24))


def test_cutting_a_batch_takes_little_of_a_step(device: torch.device) -> None:
    """The two calls for 64 pairs of cubes of 64^3 cells move 3.2 GB, which takes a GPU with HBM less than 10 ms."""
    if device.type == "cpu" or torch.cuda.get_device_properties(device).total_memory < 20e9:
        pytest.skip("needs a GPU with more than 20 GB")
    boxes = [torch.randn(channels, 128, 128, 128, device=device) for channels in (4, 5)]
    corners, symmetries = torch.randint(128, (64, 3)), torch.randint(48, (64,))

    def cut_both() -> None:
        for box in boxes:
            cut(box, corners, symmetries, 64)
        torch.cuda.synchronize()

    cut_both()
    assert measure(cut_both, min_seconds=0.5).seconds < 10e-3


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_settings_can_be_read_and_the_longest_compilation_works(
    precision: str, train: Train, device: torch.device
) -> None:
    if precision == "tf32" and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    flags = [*UNET, "--epochs", 1, "--limit_train", 32, "--precision", precision, "--compile", "max-autotune"]
    done = train("04_mixed_precision", *flags)
    assert done.status == 0, done.stderr
    rounds = precision == "tf32"
    with torch.backends.cudnn.flags(enabled=True):
        pass
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == rounds
    assert torch.get_float32_matmul_precision() == ("high" if rounds else "highest")
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == rounds
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == rounds


# Lesson 05 on one GPU. None of these has run on a GPU yet.

VIT = ["--config", CONFIGS / "vit3d.yaml", "--config", CONFIGS / "vit3d_tiny.yaml", "--train_crops", 128]
SHARDED = [*VIT, "--val_crops", 32, "--loader", "device", "--epochs", 2]
WIDE = [*VIT, "--val_crops", 16, "--vit_width", 256, "--vit_depth", 8, "--epochs", 1, "--loader", "device"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shard", ["blocks", "root"])
def test_a_sharded_model_learns_what_a_cpu_learns(
    shard: str, precision: str, train: Train, on_cpu: Train, device: torch.device
) -> None:
    if precision == "tf32" and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    fused = str(device.type == "cuda").lower()
    done = train("05_fully_sharded", *SHARDED, "--shard", shard, "--precision", precision, "--fused", fused)
    assert done.status == 0, done.stderr
    expected = on_cpu("04_mixed_precision", *SHARDED, "--fused", "false")
    assert done.losses == pytest.approx(expected.losses, rel=PRECISIONS[precision])


@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("stop", [3, 8], ids="stopped in step {}".format)
def test_a_sharded_run_goes_on_after_a_stop(stop: int, form: str, train: Train) -> None:
    flags = [*SHARDED, "--checkpoint_form", form]
    whole = train("05_fully_sharded", *flags, run="whole")
    stopped = train("05_fully_sharded", *flags, stop=stop)
    assert stopped.status == 0, stopped.stderr
    assert "stopped by SIGTERM" in stopped.stdout
    resumed = train("05_fully_sharded", *flags, "--resume", "true")
    assert resumed.status == 0, resumed.stderr
    assert resumed.losses == pytest.approx(whole.losses, rel=5e-3)


def peak_bytes(train: Train, device: torch.device, *flags: object, run: str) -> int:
    """The most GPU memory that was allocated in a run of lesson 05; on the CPU nothing is asked."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    done = train("05_fully_sharded", *WIDE, *flags, run=run)
    assert done.status == 0, done.stderr
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def test_the_training_state_is_the_least_of_the_memory_and_recomputing_needs_less(
    train: Train, device: torch.device
) -> None:
    """16 bytes for each weight are stored in any case; the activations of the blocks only without checkpointing."""
    plain = peak_bytes(train, device, run="plain")
    recomputed = peak_bytes(train, device, "--activation_checkpointing", "true", run="recomputed")
    if device.type == "cpu":
        pytest.skip("the memory of a CPU is not counted tensor by tensor")
    script = load_script(REPOSITORY / "05_fully_sharded")
    config = load_config(script.Config, [str(word) for word in WIDE])
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in script.make_model(config).parameters())
    assert 16 * weights < recomputed < plain
    activations = config.vit_depth * (config.global_batch_size * 64 * config.vit_width * 4)  # a tensor of each block
    assert plain - recomputed > 4 * activations


def test_mfu_is_a_share_of_what_the_gpu_can_do(train: Train) -> None:
    for lesson in ("04_mixed_precision", "05_fully_sharded"):
        done = train(lesson, *WIDE, "--mfu", "true", "--precision", "bf16", run=lesson)
        assert done.status == 0, done.stderr
        assert 0 < done.summary["mfu"] < 1
        assert done.summary["peak_flops_per_second"] > 0
