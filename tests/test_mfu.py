"""Model FLOPs utilization: operations are counted exactly, recomputed ones not, and measuring changes nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conftest import Script
from workshop.models import build_model
from workshop.models.gpt import gpt_size
from workshop.models.unet3d import UNet3D
from workshop.profiling import mfu
from workshop.profiling.mfu import Utilization, model_flops, peak_flops_per_second, sample_shape, utilization

CPU = torch.device("cpu")
SMALL_GPT = ["--width", 64, "--depth", 2, "--sequence_length", 16]


def test_a_linear_layer_needs_six_operations_per_weight_and_sample() -> None:
    """Two in forward, two for the gradients of the weights, two for those of the inputs, which the first one lacks."""
    assert model_flops(lambda: nn.Linear(30, 20), (30,)) == 4 * 30 * 20
    two = model_flops(lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), (30,))
    assert two == 4 * 30 * 20 + 6 * 20 * 10


@pytest.mark.parametrize(
    ("make_model", "shape"),
    [(lambda: UNet3D(4, 2), (4, 8, 8, 8)), (lambda: build_model("mnist_cnn", "mnist"), (1, 28, 28))],
    ids=["U-Net", "CNN"],
)
def test_convolutions_are_counted_without_computing_them(make_model: type, shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        make_model()(torch.randn(2, *shape)).sum().backward()
    assert model_flops(make_model, shape) == counter.get_total_flops() // 2 > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_peak_is_positive_and_leaves_the_random_numbers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu, "SIZES", {"cpu": (16, 32)})
    monkeypatch.setattr(mfu, "SECONDS_PER_SIZE", 0.001)
    state = torch.get_rng_state()
    assert peak_flops_per_second(precision, CPU) > 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("seconds", "tried", "peak"),
    [({64: 2.0, 128: 4.0, 256: 64.0}, [64, 128, 256], 2 * 128**3 / 4.0), ({64: 1e6}, [64], 2 * 64**3 / 1e6)],
    ids=["the fastest size counts", "products that take too long are not tried"],
)
def test_the_peak_is_that_of_the_fastest_product(
    seconds: dict[int, float], tried: list[int], peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mfu, "SIZES", {"cpu": (64, 128, 256)})
    monkeypatch.setattr(mfu, "LONGEST_PRODUCT", 100.0)
    sizes = []

    def seconds_of(left: torch.Tensor, right: torch.Tensor) -> float:
        sizes.append(len(left))
        assert left.dtype == right.dtype == torch.bfloat16
        return seconds[len(left)]

    monkeypatch.setattr(mfu, "_seconds_per_product", seconds_of)
    assert peak_flops_per_second("bf16", CPU) == peak
    assert sizes == tried


def test_the_utilization_is_what_is_computed_of_what_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Utilization(flops_per_sample=10, batch_size=4, peak_flops_per_second=1000.0)
    assert (found.model_flops_per_step, found.mfu(samples_per_second=25)) == (40, 0.25)
    monkeypatch.setattr(mfu, "peak_flops_per_second", lambda *_: 1e9)
    config = SimpleNamespace(dataset="nbody", crop_size=8, precision="fp32", batch_size=4)
    assert utilization(config, 7, CPU) == Utilization(7, 4, 1e9)
    assert sample_shape(config) == (4, 8, 8, 8)


@pytest.mark.parametrize("lesson", ["04_mixed_precision", "05_fully_sharded"])
def test_a_run_that_asks_for_it_shows_it_and_learns_the_same(run_script: Script, lesson: str, tmp_path: Path) -> None:
    flags = ["--limit_train", 96, "--limit_val", 32, "--batch_size", 32, "--log_interval", 2]
    flags += ["--loader", "memory"] if lesson.startswith("04") else [*SMALL_GPT, "--activation_checkpointing", "true"]
    summaries = {}
    for asked in ("true", "false"):
        result = run_script(f"{lesson}/train.py", *flags, "--mfu", asked, "--run_dir", tmp_path / asked)
        assert result.status == 0, result.stderr
        assert result.stdout.count("  mfu ") == (2 if asked == "true" else 0)  # of a step, and of the epoch
        summaries[asked] = json.loads((tmp_path / asked / "summary.json").read_text())
    with_it, without = summaries["true"], summaries["false"]
    assert with_it["epochs"][0]["train_loss"] == without["epochs"][0]["train_loss"]
    if lesson.startswith("04"):
        per_sample = model_flops(lambda: build_model("mnist_cnn", "mnist"), (1, 28, 28))
    else:  # also with recomputation
        per_sample = 16 * gpt_size("gpt_tiny", 64, 2).flops_per_token(16)
    assert with_it["model_flops_per_step"] == 32 * per_sample
    speed = with_it["epochs"][0]["samples_per_second"]
    assert with_it["mfu"] == pytest.approx(per_sample * speed / with_it["peak_flops_per_second"])
