"""Ranks with emulated GPUs: true gradients at the right time, and what follows from their measurements."""

import json
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import quick_python
from alpha_beta import Network
from conftest import REPOSITORY, Script
from emulated_figures import POINTS, efficiency, plot, predicted, published_curves, rows
from emulated_ranks import Config, EmulatedNetwork
from lab.emulated_gpu import EmulatedGPU
from ranks import start_ranks
from slow_work import Clock

LAYERS, STEP = 4, 12.0
SECONDS = {"no_sync": [0.1, 0.2], "one_bucket": [0.125, 0.2], "many_buckets": [0.1, 0.25]}
MESSAGES = [{"bytes": nbytes, "seconds": 0.002 + nbytes * 1e-9} for nbytes in (4096, 600_000, 4_800_000)]


def network(clock: Clock) -> EmulatedNetwork:
    gpu = EmulatedGPU(clock=clock.perf_counter, sleep=clock.sleep)
    return EmulatedNetwork(LAYERS, weights_per_layer=6, step_seconds=STEP, gpu=gpu)


def test_the_gradients_are_those_of_the_formula() -> None:
    emulated = network(Clock())
    inputs = torch.tensor([1.0, 2.0, 3.0])
    emulated(inputs).sum().backward()
    plain = [torch.ones(6, requires_grad=True) for _ in range(LAYERS)]
    outputs = inputs
    for weights in plain:
        outputs = outputs * weights.mean()
    outputs.sum().backward()
    for weights, expected in zip(emulated.weights, plain, strict=True):
        assert weights.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(weights.grad, expected.grad)


def test_a_gradient_is_there_when_the_work_of_its_own_layer_is_done() -> None:
    clock = Clock()
    emulated = network(clock)
    ready: dict[int, float] = {}

    def note(layer: int) -> None:
        ready[layer] = clock.now

    for layer, weights in enumerate(emulated.weights):
        weights.register_post_accumulate_grad_hook(lambda _, layer=layer: note(layer))
    loss = emulated(torch.ones(2)).sum()
    assert clock.now == 0, "launching forward takes no time"
    loss.backward()
    assert list(ready) == [3, 2, 1, 0], "the last layer is the first"
    assert list(ready.values()) == pytest.approx([6, 8, 10, 12]), "4 s of forward, then 2 s for each layer"
    pieces = list(emulated.gpu.pieces)
    assert [piece.name for piece in pieces] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert {piece.launched for piece in pieces} == {0}, "all of backward is queued when it begins"


def test_ranks_add_up_their_gradients_in_the_buckets_that_were_asked_for(user_environment: dict[str, str]) -> None:
    results = start_ranks(2, REPOSITORY / "tests" / "emulated_facts.py", cwd=REPOSITORY, environment=user_environment)
    assert [result.status for result in results] == [0, 0], results
    facts = json.loads(results[0].stdout)
    weights = round(0.01e6 / 4 / 4)
    for found in facts.values():
        assert found["equal"]
        assert found["no_sync"] == pytest.approx([3 / weights, 6 / weights]), "each rank has its own"
        assert found["first"] == pytest.approx(4.5 / weights), "their mean"
        assert found["bytes"] == 4 * 4 * weights
    assert facts["one_bucket"]["all_reduces"] == 1
    assert facts["many_buckets"]["all_reduces"] == 4


def test_the_efficiency_is_a_ratio_of_pairs() -> None:
    found = efficiency(SECONDS, "one_bucket")
    assert found["trials"] == pytest.approx([0.8, 1.0])
    assert (found["mean"], found["std"]) == (pytest.approx(0.9), pytest.approx(0.02**0.5))
    assert efficiency({"no_sync": [1.0], "one_bucket": [2.0]}, "one_bucket")["std"] == 0


def test_the_rows_have_measured_and_predicted_efficiencies(tmp_path: Path) -> None:
    measured = {
        1: {"step_seconds": SECONDS, "all_reduce": []},
        2: {"step_seconds": SECONDS, "all_reduce": MESSAGES},
    }
    one, two = rows(measured, 0.1, 4.8e6, 8)
    assert "predicted" not in one
    assert two["alpha"] == pytest.approx(0.001, rel=0.01), "two messages, one after the other"
    assert two["beta"] == pytest.approx(1e-9, rel=0.01)
    assert two["all_reduce"] == {"mean": pytest.approx(0.0068), "std": 0}
    assert two["predicted"]["one_bucket"] == pytest.approx(0.1 / 0.1068, rel=0.01)
    assert two["predicted"]["many_buckets"] == pytest.approx(0.1 / (0.1 + 0.0026), rel=0.01), "the last one is left"
    assert two["predicted"]["many_buckets_no_overlap"] == pytest.approx(0.1 / (0.1 + 8 * 0.0026), rel=0.01)
    assert two["without_communication"]["mean"] == pytest.approx(0.15)
    plot([one, two], tmp_path / "plot.png")
    assert imread(tmp_path / "plot.png").shape[1] == 1210


def test_without_a_network_the_efficiency_is_one() -> None:
    assert list(predicted(0.1, 1e6, 8, 8, Network(0, 0)).values()) == pytest.approx([1, 1, 1])


def test_the_published_points_are_between_the_predicted_bounds() -> None:
    for point in POINTS:
        ((none, full),) = published_curves([point.gpus])[point.batch_size]
        assert none < point.efficiency < full


def test_the_default_step_is_that_of_the_published_gpu() -> None:
    assert Config().step_seconds == pytest.approx(64 / 707.966)
    assert 4 * Config().weights_per_layer * Config().layers == 4_800_000


@pytest.mark.thorough
@pytest.mark.slow
def test_the_study_measures_each_number_of_ranks(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(quick_python.commands() / "python"))
    tiny = ("--milliseconds", 0.01, "--gradient_mb", 0.01, "--steps", 2, "--trials", 2)
    flags = ("--ranks", 1, 2, "--rounds", 1, "--out", tmp_path, *tiny)
    result = run_script("03_ddp/experiments/emulated_scaling.py", *flags)
    assert result.status == 0, result.stderr
    assert "emulated GPU, real communication" in result.stdout
    found = json.loads((tmp_path / "emulated_scaling.json").read_text())
    assert [row["ranks"] for row in found["rows"]] == [1, 2]
    assert all(len(trials) == 2 for row in found["rows"] for trials in row["step_seconds"].values())
    assert found["rows"][1]["predicted"].keys() >= {"one_bucket", "many_buckets"}
    assert imread(tmp_path / "emulated_scaling.png").shape[1] == 1210


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--ranks", 0), "--ranks must be 1 or more"), (("--rounds", 0), "--rounds"), (("--layers", 0), "--layers")],
)
def test_what_makes_no_sense_is_refused(flags: tuple, message: str, run_script: Script) -> None:
    result = run_script("03_ddp/experiments/emulated_scaling.py", *flags)
    assert result.status == 2
    assert message in result.stderr
