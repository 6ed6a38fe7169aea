"""All that a GPU does differently: its results against the CPU's, and against its own without an option."""

import functools
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from conftest import REPOSITORY, Train, needs_library
from lab.launching import free_port, load_script
from lab.process_group import process_group
from workshop.config import load_config
from workshop.loaders.ahead import one_ahead, stream_on
from workshop.models.gpt import HEAD_DIMENSION
from workshop.ranks import Ranks

CONFIGS = REPOSITORY / "configs"
LESSON = load_script(REPOSITORY / "04_mixed_precision")
DIGITS = ["--limit_train", 640, "--limit_val", 128, "--num_workers", 1]
STEPS_OF_DIGITS = [*DIGITS, "--limit_train", 256, "--batch_size", 32, "--loader", "device", "--epochs", 2]
STEPS_OF_DIGITS += ["--log_interval", 1]
TINY = ["--config", CONFIGS / "unet3d.yaml", "--config", CONFIGS / "unet3d_tiny.yaml"]
UNET = [*TINY, "--unet_width", 16, "--train_crops", 256, "--val_crops", 32, "--loader", "device", "--epochs", 2]
"""16 steps an epoch: a graph is recorded in the 12th"""
GRAPH = [*UNET, "--precision", "bf16", "--fused", "true", "--channels_last", "true", "--cuda_graph", "true"]
GPT = ["--width", 64, "--depth", 4, "--sequence_length", 64, "--limit_train", 128, "--limit_val", 32]
SHARDED = [*GPT, "--batch_size", 16, "--num_workers", 0, "--epochs", 2, "--log_interval", 1]
LOADERS = {
    "mnist": ["map", "shards", "memory", "device", "dali"],
    "cifar10": ["map", "shards", "memory", "device", "dali"],
    "nbody": ["map", "memory", "device", "dali"],
}
PRECISIONS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""how far, relatively, the losses may be from the CPU's in fp32"""


@pytest.mark.parametrize(
    ("name", "loader"), [(name, loader) for name, loaders in LOADERS.items() for loader in loaders]
)
def test_every_loader_gives_the_batches_that_it_gives_a_cpu(
    name: str, loader: str, data_dir: Path, device: torch.device
) -> None:
    needs_library(loader)
    words = [*TINY, "--train_crops", 64] if name == "nbody" else ["--dataset", name, "--limit_train", 128]
    words += ["--batch_size", 16, "--loader", loader, "--num_workers", 1, "--data_dir", data_dir]
    config = load_config(LESSON.Config, [str(word) for word in words])
    for split in ("train", "val"):
        mine, theirs = (
            LESSON.make_loader(config, split, Ranks(device=where)) for where in (device, torch.device("cpu"))
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


def test_what_is_computed_ahead_is_complete_and_is_not_overwritten(device: torch.device) -> None:
    def items() -> Iterator[torch.Tensor]:
        for number in range(8):
            item = torch.full((1 << 20,), -1.0, device=device)
            busy(device)  # so that who does not wait for the item reads what it was before
            yield item.fill_(number)

    sums = []
    for item in one_ahead(items(), stream_on(device)):
        busy(device)  # so that who does not wait for this overwrites the item that is read below
        sums.append(item.sum())
    assert [each.item() for each in sums] == [number * 2**20 for number in range(8)]


def busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms


def test_the_device_loader_of_volumes_launches_few_kernels_for_a_batch(data_dir: Path, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("counts launches on a GPU")
    words = [*TINY, "--loader", "device", "--batch_size", 64, "--global_batch_size", 64, "--data_dir", data_dir]
    loader = LESSON.make_loader(load_config(LESSON.Config, list(map(str, words))), "train", Ranks(device=device))
    loader.batch_sampler.set_epoch(1)
    batches = iter(loader)
    next(batches)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        next(batches)
    on_gpu = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(on_gpu) < 60  # of 64 cubes; cut one by one, some 800


@pytest.mark.parametrize("lesson", ["01_single_gpu", "02_dataparallel", "03_ddp"])
def test_the_first_lessons_train(lesson: str, train: Train, device: torch.device) -> None:
    done = train(lesson, *DIGITS, "--epochs", 2, "--monitor", "true")
    first, _, last, _ = done.losses
    assert last < first < 2.5
    hardware = done.summary["hardware"]
    assert hardware["device"] == device.type
    if device.type == "cuda":
        assert hardware["gpus"] == torch.cuda.device_count() and hardware["driver"]
        assert "gpu_memory" in json.dumps(done.summary["monitor"])


def test_a_gpu_computes_in_bf16_by_default(train: Train, device: torch.device) -> None:
    done = train("04_mixed_precision", *DIGITS)
    assert done.losses
    if device.type == "cuda":
        chosen = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
        assert f"--precision auto: {chosen}, because" in done.stdout
        assert done.summary["config"]["precision"] == chosen


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_what_a_cpu_learns(
    precision: str, train: Train, on_cpu: Train, device: torch.device
) -> None:
    if precision == "tf32" and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    done = train("04_mixed_precision", *UNET, "--precision", precision)
    expected = on_cpu("04_mixed_precision", *UNET, "--precision", "fp32")
    assert done.losses == pytest.approx(expected.losses, rel=PRECISIONS[precision])
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")


def test_a_graph_learns_what_single_kernels_do_and_its_learning_rate_falls(train: Train) -> None:
    plain = train("04_mixed_precision", *GRAPH, "--cuda_graph", "false", run="plain")
    graph = train("04_mixed_precision", *GRAPH, run="graph")
    assert graph.losses == pytest.approx(plain.losses, rel=5e-3)
    checkpoint = torch.load(graph.folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    (group,) = checkpoint["optimizer"]["param_groups"]
    assert float(group["lr"]) == pytest.approx(0, abs=1e-9)  # a cosine ends there


@pytest.mark.parametrize("stop", [3, 14, 20], ids="stopped in step {}".format)
def test_a_graph_goes_on_after_a_stop(stop: int, train: Train) -> None:
    flags = [*GRAPH, "--log_interval", 1]
    whole = train("04_mixed_precision", *flags, run="whole")
    stopped = train("04_mixed_precision", *flags, stop=stop)
    assert stopped.status == 0, stopped.stderr
    assert f"after step {(stop - 1) % 16 + 1}\n" in stopped.stdout
    resumed = train("04_mixed_precision", *flags, "--resume", "true")
    assert resumed.losses == pytest.approx(whole.losses, rel=5e-3)


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_compiled_code_learns_what_single_kernels_do(mode: str, train: Train) -> None:
    flags = [*UNET, "--unet_depth", 1, "--precision", "bf16"]  # each size of a convolution takes seconds to compile
    plain = train("04_mixed_precision", *flags, run="plain")
    graph = ["--cuda_graph", "true", "--fused", "true"] if mode == "default" else []
    compiled = train("04_mixed_precision", *flags, "--compile", mode, *graph)
    assert compiled.losses == pytest.approx(plain.losses, rel=2e-2)


def test_compiled_code_takes_a_volume_of_one_cell_in_channels_last(train: Train) -> None:
    """As the full U-Net has it in its middle. `run.py` without --values compiles; with it, everything is eager."""
    flags = [*UNET, "--unet_depth", 4, "--precision", "bf16", "--channels_last", "true", "--epochs", 1]
    plain = train("04_mixed_precision", *flags, run="plain")
    compiled = train("04_mixed_precision", *flags, "--compile", "default")
    assert compiled.losses == pytest.approx(plain.losses, rel=2e-2)


def test_everything_at_once_on_digits(train: Train, device: torch.device) -> None:
    configs = ["--config", CONFIGS / "mnist.yaml", "--config", CONFIGS / "mnist_fast.yaml"]
    cudnn = ["--cudnn_benchmark", "true"] if device.type == "cuda" else []
    done = train("04_mixed_precision", *configs, *cudnn, "--cuda_graph", "true", "--epochs", 2)
    assert done.status == 0, done.stderr
    assert done.summary["epochs"][-1]["val_accuracy"] > 0.5


def test_a_trace_has_the_kernels(train: Train, device: torch.device) -> None:
    done = train("04_mixed_precision", *UNET, "--epochs", 1, "--trace", "true")
    assert done.status == 0, done.stderr
    (file,) = done.folder.glob("rank0*.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"forward", "backward", "optimizer"} <= names
    assert device.type == "cpu" or any(event.get("cat") == "kernel" for event in events)


def test_without_dropout_data_parallel_learns_what_one_gpu_learns(start: Train) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    losses = {}
    for dropout in ("true", "false"):
        flags = [*DIGITS, "--epochs", 1, "--dropout", dropout]
        two, one = start("02_dataparallel", *flags, run="two"), start("01_single_gpu", *flags, run="one")
        assert "DataParallel uses" in two.stdout
        losses[dropout] = two.losses == pytest.approx(one.losses, rel=1e-3)
    assert losses == {"true": False, "false": True}


JOINING = {
    "an experiment": """
from lab.process_group import process_group
with process_group() as (_, _, device):
    dist.all_reduce(torch.ones(1, device=device))
""",
    "slurm/preflight.py": """
import preflight
print(preflight.join_ranks())
""",
    "slurm/first_hour.py": """
import first_hour
first_hour.compute_speed = lambda *_: 1.0
first_hour.CPU_SIZES = first_hour.GPU_SIZES = (1,)
first_hour.main()
""",
}
NAMED = """
import sys, torch, torch.distributed as dist
from workshop.explain import backend_class
all_reduce = dist.all_reduce
def named(tensor, *args, group=None, **more):
    print("over", type((group or dist.group.WORLD)._get_backend(tensor.device)).__name__, "on", tensor.device)
    return all_reduce(tensor, *args, group=group, **more)
dist.all_reduce = named
"""


def test_experiments_and_checks_join_as_the_lessons_do(start: Train, device: torch.device) -> None:
    """Over the same backend of NCCL; and the task of local rank 1 may see only its own GPU, which then is cuda:0."""
    rank = {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    rank |= {"CUDA_VISIBLE_DEVICES": "0"} if device.type == "cuda" else {}
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "slurm"), os.environ.get("PYTHONPATH", "")])

    def run(program: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | rank | {"PYTHONPATH": paths, "MASTER_PORT": str(free_port())}
        return subprocess.run([sys.executable, "-c", NAMED + program], env=env, capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:  # all at once: most of their time is their start
        programs = {name: pool.submit(run, program) for name, program in JOINING.items()}
        lesson = start("03_ddp", *DIGITS, MASTER_PORT=str(free_port()), **rank)
    assert lesson.losses
    backend, on = lesson.summary["backend_class"], "cuda:0" if device.type == "cuda" else "cpu"
    for name, program in programs.items():
        done = program.result()
        assert done.returncode == 0, done.stderr
        assert f"over {backend} on {on}" in done.stdout, name


def test_one_rank_over_nccl_and_a_mistake_in_one_line(start: Train, device: torch.device) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with ThreadPoolExecutor() as pool:
        flags = [*DIGITS, "--lr", 1e18, "--optimizer", "sgd"]
        mistake = pool.submit(lambda: start("03_ddp", *flags, run="mistaken", **rank))
        done = start("03_ddp", *DIGITS, **rank)
    assert done.losses
    assert done.summary["backend"] == ("nccl" if device.type == "cuda" else "gloo")
    mistaken = mistake.result()
    assert mistaken.status == 2
    # PyTorch warns after it that the process group was not destroyed.
    assert any(line.startswith("error: the loss is not finite") for line in mistaken.stderr.splitlines())


def test_a_first_step_that_overflows_leaves_no_momentum(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device=device))
    config = LESSON.Config(optimizer="sgd", lr=0.5, fused=True)
    optimizer = LESSON.make_optimizer(config, torch.nn.ParameterList([weight]))
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale((torch.inf * weight).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight.detach().cpu(), torch.ones(1000))
    assert not optimizer.state[weight]["momentum_buffer"].any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shard", ["blocks", "root"])
def test_a_sharded_model_learns_what_a_cpu_learns(
    shard: str, precision: str, train: Train, on_cpu: Train, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "tf32" and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    # With the scaler's first factor of 65,536 a gradient of 1 is infinite in fp16, and its update is left out, as it
    # has to be: on this text the eighth. Then the losses are not those of a run that takes every update.
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=1024.0))
    fused = str(device.type == "cuda").lower()
    done = train("05_fully_sharded", *SHARDED, "--shard", shard, "--precision", precision, "--fused", fused)
    expected = on_cpu("05_fully_sharded", *SHARDED, "--precision", "fp32", "--fused", "false")
    assert done.losses == pytest.approx(expected.losses, rel=PRECISIONS[precision])


@pytest.mark.parametrize("async_save", ["false", "true"])
@pytest.mark.parametrize("fused", ["false", "true"])
@pytest.mark.parametrize("lesson", ["04_mixed_precision", "05_fully_sharded"])
def test_a_run_goes_on_after_a_stop_with_the_same_optimizer(
    lesson: str, fused: str, async_save: str, train: Train
) -> None:
    if lesson.startswith("04") and async_save == "true":
        pytest.skip("lesson 04 saves at once")
    flags = ["--precision", "fp32", "--fused", fused, "--save_interval", 3]
    flags += [*SHARDED, "--async_save", async_save] if lesson.startswith("05") else STEPS_OF_DIGITS
    whole = train(lesson, *flags, run="whole")
    stopped = train(lesson, *flags, stop=7)
    assert stopped.status == 0, stopped.stderr
    resumed = train(lesson, *flags, "--resume", "true")
    assert "after step 7\n" in resumed.stdout
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-3)
    other = train(
        lesson, *flags, "--resume", "true", "--epochs", 3, "--fused", {"true": "false", "false": "true"}[fused]
    )
    assert other.status == 2 and "was saved with --fused" in other.stderr


def test_attention_takes_the_kernels_that_the_page_names(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU has other kernels")
    architecture = torch.cuda.get_device_capability(device)
    names = flash, cudnn, efficient, products = "flash", "cudnn", "efficient", "attention_math"
    in_fp16 = {7: efficient, 8: flash, 9: cudnn, 10: cudnn, 12: flash}[architecture[0]]
    expected = [in_fp16, products if architecture[0] == 7 else in_fp16, efficient]
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        query = torch.zeros(1, 2, 64, HEAD_DIMENSION, device=device, dtype=dtype)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            F.scaled_dot_product_attention(query, query, query, is_causal=True)
        called = " ".join(event.name for event in recorded.events())
        found.append(next(name for name in names if f"aten::_scaled_dot_product_{name}" in called))
    assert found == expected


def test_generating_text_makes_no_plan_of_cudnn_for_each_length(device: torch.device) -> None:
    """Where attention in 16 bits is cuDNN's (Hopper), because there the text grows by a token in each call."""
    script = load_script(REPOSITORY / "05_fully_sharded")
    config = load_config(script.Config, [str(word) for word in [*GPT, "--sample", 3]])
    model = script.make_model(config).to(device, torch.bfloat16)
    with process_group(on_cpu=device.type == "cpu"), profile(activities=[ProfilerActivity.CPU]) as recorded:
        script.write_text(model, config, device)
    attention = [event.name for event in recorded.events() if "_scaled_dot_product_" in event.name]
    assert attention and not any("cudnn" in name for name in attention)


def test_recomputing_needs_less_memory(train: Train, device: torch.device) -> None:
    """The activations of a block are stored only without it; 16 bytes for each weight in any case."""
    if device.type == "cpu":
        pytest.skip("the memory of a CPU is not counted tensor by tensor")
    wide = [*SHARDED, "--width", 256, "--depth", 8, "--epochs", 1]
    peaks = []
    for flag in ("false", "true"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        done = train("05_fully_sharded", *wide, "--activation_checkpointing", flag, run=flag)
        assert done.status == 0, done.stderr
        peaks.append(torch.cuda.max_memory_allocated())
    script = load_script(REPOSITORY / "05_fully_sharded")
    with torch.device("meta"):
        model = script.make_model(load_config(script.Config, [str(word) for word in wide]))
    assert 16 * sum(weight.numel() for weight in model.parameters()) < peaks[1] < peaks[0]


def test_mfu_is_a_share_of_what_the_device_can_do(train: Train, device: torch.device) -> None:
    precision = "bf16" if device.type == "cuda" else "fp32"  # many CPUs emulate bf16
    for lesson in ("04_mixed_precision", "05_fully_sharded"):
        flags = SHARDED if lesson.startswith("05") else STEPS_OF_DIGITS
        done = train(lesson, *flags, "--epochs", 1, "--mfu", "true", "--precision", precision, run=lesson)
        assert done.status == 0, done.stderr
        assert 0 < done.summary["mfu"] < 1
        assert done.summary["peak_flops_per_second"] > 0


def test_the_memory_of_a_step_is_measured_without_that_of_others(
    data_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured as experiments/format_errors.py does it, while the gradients that it compares with are in memory."""
    monkeypatch.syspath_prepend(REPOSITORY / "04_mixed_precision/experiments")
    import format_errors

    words = [*TINY, "--batch_size", 16, "--precision", "fp32", "--data_dir", data_dir]
    config = load_config(LESSON.Config, [str(word) for word in words])
    peaks = []
    for others in (0, 2**28):
        kept = torch.empty(others, dtype=torch.uint8, device=device)
        batch = tuple(torch.zeros(16, channels, 16, 16, 16, device=device) for channels in (4, 5))
        peaks.append(format_errors.peak_bytes(config, LESSON.make_model(config).to(device), batch))
        del kept
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def processes_on_gpus() -> list[set[int]]:
    """Return for each GPU the processes that have a CUDA context there."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [{process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} for handle in handles]


def test_a_rank_that_saves_in_a_thread_opens_no_other_gpu(data_dir: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.empty_cache()
    words = [*SHARDED, "--async_save", "true", "--save_interval", 2, "--data_dir", data_dir, "--run_dir", tmp_path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "train.py", *words]
    before = set.union(*processes_on_gpus())
    seen: dict[int, set[int]] = {}
    with subprocess.Popen([*map(str, command)], cwd=REPOSITORY / "05_fully_sharded", env=dict(os.environ)) as run:
        while run.poll() is None:
            for gpu, processes in enumerate(processes_on_gpus()):
                for process in processes - before:
                    seen.setdefault(process, set()).add(gpu)
    assert run.returncode == 0
    assert len(seen) >= 2 and all(len(gpus) == 1 for gpus in seen.values()), seen
