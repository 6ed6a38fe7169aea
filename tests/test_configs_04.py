"""A value in a configuration of the U-Net, or behind a flag of lesson 04, reaches the code it names."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conftest import REPOSITORY, Script
from fake_graphs import fake_graphs
from lab.launching import load_script
from workshop.commandline import load_config
from workshop.models.unet3d import UNet3D

CPU = torch.device("cpu")
CONFIGS = REPOSITORY / "configs"
BASE = CONFIGS / "unet3d.yaml"
OPTIONS = CONFIGS / "unet3d_opt.yaml"
OVERLAYS = sorted(CONFIGS.glob("unet3d_*.yaml"))


def files_of(overlay: Path | None) -> list[Path]:
    """The files of a named configuration, in their order: the overlays for a batch size go on top of the options."""
    options = [OPTIONS] if overlay and "_bs" in overlay.name else []
    return [BASE, *options, *([overlay] if overlay else [])]


LESSON = load_script(REPOSITORY / "04_mixed_precision")
CHECKS = sys.modules["checks"]
Config, lr_factor = LESSON.Config, LESSON.lr_factor


def keys_of(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def configuration(*files: Path, flags: tuple[object, ...] = ()) -> Config:
    words = [word for file in files for word in ("--config", file)]
    return load_config(Config, [str(word) for word in (*words, *flags)])


def test_the_named_configurations_are_there() -> None:
    names = {"short", "tiny", "opt", "bs256_opt", "bs512_test", "bs512_opt", "bs2048_opt"}
    assert {file.stem.removeprefix("unet3d_") for file in OVERLAYS} == names
    page = (REPOSITORY / "04_mixed_precision" / "experiments" / "unet3d.md").read_text()
    assert [file.name for file in OVERLAYS if f"../../configs/{file.name}" not in page] == []


@pytest.mark.parametrize("overlay", [None, *OVERLAYS], ids=lambda file: file.stem if file else "base")
def test_every_key_of_an_overlay_wins_over_the_base_and_flags_over_both(overlay: Path | None) -> None:
    files = files_of(overlay)
    keys = {name: value for file in files for name, value in keys_of(file).items()}
    config = configuration(*files)
    assert {name: getattr(config, name) for name in keys} == keys
    changed = configuration(*files, flags=("--epochs", 3, "--lr", 0.5, "--train_crops", 77, "--precision", "fp16"))
    flags = {"epochs": 3, "lr": 0.5, "train_crops": 77, "precision": "fp16"}
    assert {name: getattr(changed, name) for name in (*keys, "precision")} == keys | flags


def test_overlays_are_what_the_tutorial_has() -> None:
    """Samples, epochs, global batch, steps and learning rate of NERSC/sc22-dl-tutorial, config/UNet.yaml."""
    expected = {  # train_crops, epochs, global batch, steps, highest learning rate
        "short": (4096, 4, 64, 256, 2e-4),
        "opt": (65536, 10, 64, 10240, 2e-4),
        "bs256_opt": (65536, 20, 256, 5120, 4e-4),
        "bs512_test": (65536, 10, 512, 1280, 2e-4 * math.sqrt(8)),
        "bs512_opt": (65536, 40, 512, 5120, 2e-4 * math.sqrt(8)),
        "bs2048_opt": (65536, 160, 2048, 5120, 2e-4 * math.sqrt(32)),
    }
    for name, (crops, epochs, batch, steps, highest) in expected.items():
        config = configuration(*files_of(CONFIGS / f"unet3d_{name}.yaml"))
        assert (config.train_crops, config.epochs, config.global_batch_size) == (crops, epochs, batch)
        assert config.epochs * (crops // batch) == steps
        factors = [lr_factor(config, batch, step, steps) for step in range(steps)]
        assert config.lr * max(factors) == pytest.approx(highest, rel=1e-3)
        warmup = factors.index(max(factors)) + 1
        assert warmup == pytest.approx(12 if name == "short" else 128, abs=1)


def test_overlays_for_a_batch_size_change_the_schedule_alone() -> None:
    for file in OVERLAYS:
        if "_bs" in file.name:
            assert keys_of(file).keys() <= {"global_batch_size", "epochs", "warmup"}
            assert configuration(*files_of(file)).precision == keys_of(OPTIONS)["precision"] == "bf16"


@pytest.mark.parametrize("overlay", [None, *OVERLAYS], ids=lambda file: file.stem if file else "base")
def test_what_an_overlay_says_is_what_is_built(overlay: Path | None) -> None:
    config = configuration(*files_of(overlay))
    assert LESSON.batch_size_per_rank(config, world_size=4) == config.global_batch_size // 4
    with torch.device("meta"):
        model = LESSON.make_model(config)
        assert isinstance(model, UNet3D)
        assert (model.down[0].out_channels, len(model.down)) == (config.unet_width, config.unet_depth)
        assert model(torch.empty(1, 4, *[config.crop_size] * 3)).shape[-1] == config.crop_size
    optimizer = LESSON.make_optimizer(config, torch.nn.Linear(2, 2))
    (group,) = optimizer.param_groups
    assert type(optimizer).__name__.lower() == config.optimizer
    assert (group["lr"], bool(group["fused"])) == (config.lr, config.fused)


class Seen(Exception):
    """What was to be seen has been seen."""


@pytest.fixture
def arguments_of(run_script: Script, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs train.py up to the call of something, and returns what that was called with."""

    def run(module: object, name: str, *flags: object) -> dict[str, Any]:
        seen = {}

        def spy(*positional: object, **named: object) -> None:
            seen.update(named, positional=positional)
            raise Seen

        with monkeypatch.context() as patch:
            patch.setattr(module, name, spy)
            with pytest.raises(Seen):
                run_script("04_mixed_precision/train.py", "--loader", "memory", "--limit_train", 64, *flags)
        return seen

    return run


def test_flags_reach_the_calls_they_name(arguments_of: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "checks", CHECKS)  # another lesson has a module of this name
    monkeypatch.setattr(CHECKS, "check_compiler", lambda _: None)
    compiled = arguments_of(torch, "compile", "--compile", "max-autotune")
    assert (compiled["mode"], compiled["dynamic"]) == ("max-autotune", False)
    for precision, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        assert arguments_of(torch.amp, "GradScaler", "--precision", precision)["enabled"] == (precision == "fp16")
        autocast = arguments_of(torch, "autocast", "--precision", precision)
        assert (autocast["positional"][1:], autocast["enabled"]) == ((dtype,), True)
    autocast = arguments_of(torch, "autocast")
    assert (autocast["positional"][1:], autocast["enabled"]) == ((None,), False)
    adam = arguments_of(torch.optim, "Adam", "--fused", "true", "--lr", 0.25)
    assert (adam["fused"], adam["lr"], adam["capturable"]) == (True, 0.25, False)
    assert arguments_of(torch, "set_float32_matmul_precision")["positional"] == ("highest",)
    memory_format = arguments_of(torch.nn.Module, "to", "--channels_last", "true")["memory_format"]
    assert memory_format == torch.channels_last
    assert arguments_of(torch.nn.Module, "to")["memory_format"] == torch.contiguous_format


def test_flags_for_a_gpu_reach_the_calls_they_name(
    arguments_of: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "checks", CHECKS)  # another lesson has a module of this name
    monkeypatch.setattr(CHECKS, "check_options", lambda *_: None)
    assert arguments_of(torch, "set_float32_matmul_precision", "--precision", "tf32")["positional"] == ("high",)
    fake_graphs(monkeypatch, lambda: None)
    assert arguments_of(torch.optim, "Adam", "--cuda_graph", "true")["capturable"] is True
    recorded = arguments_of(torch.cuda, "CUDAGraph", "--cuda_graph", "true")
    assert recorded["positional"] == ()
