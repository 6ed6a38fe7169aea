"""Model FLOPs utilization: operations are counted exactly, recomputed ones not, and only runs that ask for it count."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from conftest import REPOSITORY, Script
from workshop.models import build_model
from workshop.models.unet3d import UNet3D
from workshop.models.vit import build_vit
from workshop.profiling.mfu import Utilization, model_flops, peak_flops_per_second, utilization

CPU = torch.device("cpu")


def test_a_linear_layer_needs_six_operations_per_weight_and_sample() -> None:
    """Two in forward, two for the gradients of the weights, two for those of the inputs, which the first one lacks."""
    assert model_flops(lambda: nn.Linear(30, 20), (30,)) == 4 * 30 * 20
    two = model_flops(lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), (30,))
    assert two == 4 * 30 * 20 + 6 * 20 * 10


def test_every_operation_of_a_transformer_is_counted_once() -> None:
    depth, width, patches, pixels = 4, 64, 16, 49
    blocks = 6 * depth * 12 * width**2 * patches
    attention = 6 * depth * 2 * patches**2 * width
    ends = 4 * pixels * width * patches + 6 * width * 10 * patches
    assert model_flops(partial(build_vit, "mnist", 0, 7, width, depth), (1, 28, 28)) == blocks + attention + ends


@pytest.mark.parametrize(
    ("make_model", "shape"),
    [
        (lambda: UNet3D(4, 2), (4, 8, 8, 8)),
        (lambda: build_model("mnist_cnn", "mnist"), (1, 28, 28)),
        (lambda: build_model("resnet18", "cifar10"), (3, 32, 32)),
    ],
    ids=["U-Net", "CNN", "ResNet"],
)
def test_convolutions_are_counted_without_computing_them(make_model: type, shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        make_model()(torch.randn(2, *shape)).sum().backward()
    assert model_flops(make_model, shape) == counter.get_total_flops() // 2 > 0


def test_what_checkpointing_computes_again_does_not_count() -> None:
    """The run passes the model without checkpointing; this shows what it would count otherwise."""

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(30, 20), nn.Sequential(nn.Linear(20, 10), nn.GELU())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(inputs), use_reentrant=False)

    plain = model_flops(lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), (30,))
    assert model_flops(Recomputing, (30,)) == plain + 2 * 20 * 10


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_peak_is_positive_and_leaves_the_random_numbers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workshop.profiling.mfu.SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr("workshop.profiling.mfu.SECONDS_PER_SIZE", 0.01)
    state = torch.get_rng_state()
    assert peak_flops_per_second(precision, CPU) > 1e6
    assert torch.equal(state, torch.get_rng_state())


def test_sizes_that_take_too_long_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workshop.profiling.mfu.SIZES", {"cpu": (64, 128, 256)})
    tried = []

    def one_second(left: torch.Tensor, *_: torch.Tensor) -> float:
        tried.append(len(left))
        return 1.0

    monkeypatch.setattr("workshop.profiling.mfu._seconds_per_product", one_second)
    assert peak_flops_per_second("fp16", CPU) == 2 * 64**3
    assert tried == [64]


def test_the_utilization_is_what_is_computed_of_what_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Utilization(flops_per_sample=10, batch_size=4, peak_flops_per_second=1000.0)
    assert (found.model_flops_per_step, found.mfu(samples_per_second=25)) == (40, 0.25)
    monkeypatch.setattr("workshop.profiling.mfu.peak_flops_per_second", lambda *_: 1e9)

    class Options:
        dataset, crop_size, precision, batch_size = "nbody", 8, "fp32", 4

    make_model = partial(UNet3D, 4, 2)
    assert utilization(Options(), make_model, CPU).flops_per_sample == model_flops(make_model, (4, 8, 8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("lesson", ["04_mixed_precision", "05_fully_sharded"])
def test_a_run_that_asks_for_it_shows_it_and_learns_the_same(run_script: Script, lesson: str, tmp_path: Path) -> None:
    short = ["--limit_train", 96, "--limit_val", 32, "--batch_size", 32, "--loader", "memory", "--log_interval", 2]
    more = [] if lesson.startswith("04") else ["--activation_checkpointing", "true"]
    summaries = {}
    for mfu in ("true", "false"):
        flags = [*short, *more, "--model", "vit", "--mfu", mfu, "--run_dir", tmp_path / mfu]
        result = run_script(f"{lesson}/train.py", *flags)
        assert result.status == 0, result.stderr
        assert result.stdout.count("  mfu ") == (2 if mfu == "true" else 0)  # of a step, and of the epoch
        summaries[mfu] = json.loads((tmp_path / mfu / "summary.json").read_text())
    with_it, without = summaries["true"], summaries["false"]
    names = {"mfu", "model_flops_per_step", "peak_flops_per_second"}
    assert with_it.keys() - without.keys() == names
    assert with_it["epochs"][0]["train_loss"] == without["epochs"][0]["train_loss"]
    per_sample = model_flops(partial(build_vit, "mnist", 0, 7, 64, 4), (1, 28, 28))  # also with recomputation
    assert with_it["model_flops_per_step"] == 32 * per_sample
    rate = with_it["epochs"][0]["samples_per_second"]
    assert with_it["mfu"] == pytest.approx(per_sample * rate / with_it["peak_flops_per_second"])


def test_it_is_not_imported_by_a_run_that_does_not_ask_for_it() -> None:
    code = "import sys, train; print({'workshop.profiling.mfu', 'torch.utils.flop_counter'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY / "04_mixed_precision",
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout.strip() == "set()"
