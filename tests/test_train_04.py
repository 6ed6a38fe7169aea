"""Lesson 04 as its user runs it: every option that a CPU has trains every workload, alone, resumed and on two ranks."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import start_ranks
from workshop.commandline import load_config
from workshop.models.unet3d import UNet3D
from workshop.run import Run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FOLDER = REPOSITORY / "04_mixed_precision"
LESSON = load_script(FOLDER)
TINY = ["--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml"]
SHORT = ["--limit_train", 64, "--limit_val", 33, "--loader", "memory", "--num_workers", 0, "--batch_size", 32]
MNIST = [*SHORT]
CIFAR = ["--config", "../configs/cifar10.yaml", *SHORT]
UNET = [*TINY, "--unet_width", 4, "--crop_size", 8, "--train_crops", 32, "--val_crops", 17, "--global_batch_size", 16]
WORKLOADS = {"mnist": MNIST, "cifar10": CIFAR, "nbody": UNET}


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "04_mixed_precision/train.py")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def losses_of(folder: Path) -> list[float]:
    return [epoch[name] for epoch in summary_of(folder)["epochs"] for name in ("train_loss", "val_loss")]


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


@pytest.mark.thorough
def test_the_fast_configuration_learns_as_well(train: Script, tmp_path: Path) -> None:
    configs = ["--config", "../configs/mnist.yaml", "--config", "../configs/mnist_fast.yaml"]
    result = train(*configs, "--run_dir", tmp_path)
    assert result.status == 0, result.stderr
    assert summary_of(tmp_path)["epochs"][0]["val_accuracy"] > 0.7


@pytest.mark.thorough
def test_the_loss_of_the_tiny_unet_is_half_of_the_identity_baseline(
    train: Script, data_dir: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--limit_train", 480, "--epochs", 1]
    for precision in ("fp32", "bf16"):
        result = train(*flags, "--precision", precision, "--run_dir", tmp_path / precision)
        assert result.status == 0, result.stderr
    fp32, bf16 = (losses_of(tmp_path / precision)[-1] for precision in ("fp32", "bf16"))
    files = [str(REPOSITORY / "configs" / name) for name in ("unet3d.yaml", "unet3d_tiny.yaml")]
    words = ["--config", files[0], "--config", files[1], "--data_dir", str(data_dir)]
    batches = list(LESSON.make_loader(load_config(LESSON.Config, words), "val", CPU, 0, 1))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    identity = torch.cat([inputs, torch.zeros_like(targets[:, 4:])], dim=1)  # the same temperature everywhere
    baseline = F.l1_loss(identity, targets).item()
    assert fp32 < baseline / 2
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

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)
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
def save_and_stop(*arguments):
    save(*arguments)
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
    start = partial(start_ranks, 2, cwd=FOLDER, environment=user_environment)
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
        2, "train.py", *flags, "--run_dir", tmp_path / "two", cwd=FOLDER, environment=user_environment
    )
    assert [result.status for result in results] == [0, 0], results[0].stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=5e-3)


def read_switches() -> tuple[object, ...]:
    """Read every switch for TF32 that PyTorch has; none of them may raise an error."""
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


def test_switches_reach_torch() -> None:
    exact = (False, False, "highest", "ieee", "none", "none")  # none: as for the whole backend, where it is none, too
    try:
        for precision in ("fp32", "tf32", "bf16", "tf32", "fp16", "fp32"):
            LESSON.set_precision(precision, cudnn_benchmark=precision == "bf16")
            assert read_switches() == ((True, True, "high", "tf32", "tf32", "tf32") if precision == "tf32" else exact)
            assert torch.backends.cudnn.benchmark == (precision == "bf16")
        assert torch.backends.cudnn.fp32_precision == torch.backends.fp32_precision == "none"
    finally:
        LESSON.set_precision("fp32", cudnn_benchmark=False)


def test_channels_last_reaches_the_weights(train: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    make_ddp = torch.nn.parallel.DistributedDataParallel.__init__

    def init(ddp: torch.nn.Module, model: torch.nn.Module, **options: object) -> None:
        if isinstance(model, UNet3D):
            weights.append(model.down[0].weight)
        else:
            weights.append(next(weight for weight in model.parameters() if weight.dim() == 4 and weight.shape[1] > 1))
        make_ddp(ddp, model, **options)

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", init)
    for name, flags in (("nbody", UNET), ("mnist", MNIST)):
        for channels_last in ("true", "false"):
            result = train(*flags, "--channels_last", channels_last, "--run_dir", tmp_path / name)
            assert result.status == 0, result.stderr
    volumes, plain_volumes, images, plain_images = weights
    assert volumes.is_contiguous(memory_format=torch.channels_last_3d) and not volumes.is_contiguous()
    assert images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    assert plain_volumes.is_contiguous() and plain_images.is_contiguous()
