"""The all-reduce benchmark, the alpha-beta model that is fitted to it, and what that predicts."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from alpha_beta import Network, Step, beta_for, bus_bandwidth_factor, equal_buckets, fit, weak_efficiency
from conftest import REPOSITORY, Script
from prediction import against_measured, against_published, ddp_buckets, published_steps
from ranks import start_ranks
from workshop.models import build_model

NETWORK = Network(alpha=50e-6, beta=1 / 2e9)
STEP = Step(compute_seconds=0.1, bucket_bytes=equal_buckets(4e7, 4))
RANKS = [2**i for i in range(11)]


def test_an_all_reduce_takes_what_the_formula_says() -> None:
    assert NETWORK.all_reduce_seconds(1e6, 2) == pytest.approx(2 * 50e-6 + 1e6 / 2e9)
    assert NETWORK.all_reduce_seconds(1e6, 4) == pytest.approx(6 * 50e-6 + 1.5 * 1e6 / 2e9)
    assert NETWORK.all_reduce_seconds(1e6, 1) == 0
    assert (bus_bandwidth_factor(2), bus_bandwidth_factor(4)) == (1, 1.5)


def test_the_fit_finds_the_network_that_was_measured() -> None:
    sizes = [4096 * 4**i for i in range(8)]
    exact = [(size, ranks, NETWORK.all_reduce_seconds(size, ranks)) for size in sizes for ranks in (2, 8)]
    found = fit(exact)
    assert (found.alpha, found.beta) == (pytest.approx(NETWORK.alpha), pytest.approx(NETWORK.beta))
    noisy = fit([(size, ranks, seconds * (1.1 if size % 5 else 0.9)) for size, ranks, seconds in exact])
    assert (noisy.alpha, noisy.beta) == (pytest.approx(NETWORK.alpha, rel=0.15), pytest.approx(NETWORK.beta, rel=0.15))


def test_the_fit_has_no_negative_cost() -> None:
    assert fit([(1e3, 2, 1e-9), (1e6, 2, 1e-3)]).alpha == 0
    assert fit([(1e3, 2, 2e-3), (1e6, 2, 1e-3)]).beta == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_efficiency_falls_with_ranks_from_one(overlap: bool) -> None:
    found = [weak_efficiency(STEP, NETWORK, ranks, overlap) for ranks in RANKS]
    assert found[0] == 1
    assert all(0 < later < earlier for earlier, later in pairwise(found))
    assert all(weak_efficiency(STEP, Network(0, 0), ranks, overlap) == pytest.approx(1) for ranks in RANKS)


def test_what_can_hide_and_what_cannot() -> None:
    for ranks in RANKS[1:]:
        bucket = NETWORK.all_reduce_seconds(1e7, ranks)
        none, full = (STEP.compute_seconds / weak_efficiency(STEP, NETWORK, ranks, o) for o in (False, True))
        assert none == pytest.approx(0.1 + 4 * bucket)
        assert 0.1 + bucket <= full + 1e-12
        assert full < none
    fast = Network(0, 1e-12)
    assert 0.1 / weak_efficiency(STEP, fast, 2, True) == pytest.approx(0.1 + fast.all_reduce_seconds(1e7, 2))
    one_bucket = Step(0.1, (4e7,))
    assert weak_efficiency(one_bucket, NETWORK, 8, True) == weak_efficiency(one_bucket, NETWORK, 8, False)


def test_more_work_per_step_scales_better() -> None:
    twice = Step(2 * STEP.compute_seconds, STEP.bucket_bytes)
    for overlap in (True, False):
        assert weak_efficiency(twice, NETWORK, 64, overlap) > weak_efficiency(STEP, NETWORK, 64, overlap)


def test_the_bandwidth_for_an_efficiency() -> None:
    for overlap in (True, False):
        beta = beta_for(0.8, STEP, 1e-6, 16, overlap)
        assert weak_efficiency(STEP, Network(1e-6, beta), 16, overlap) == pytest.approx(0.8)
    assert beta_for(0.99, STEP, alpha=1, ranks=16, overlap=False) == 0


def test_the_published_study_is_set_beside_the_prediction() -> None:
    found = against_published(published_steps(), Network(0, 1 / 25e9))
    none_64, none_128, full_64, full_128 = found
    assert none_64["predicted"] == pytest.approx(118.5 / (118.5 + 37.1), abs=0.001)
    assert none_64["off_by"] == pytest.approx(none_64["predicted"] - 0.78)
    assert (none_64["calibrated"], full_64["calibrated"]) == (pytest.approx(0.78), pytest.approx(0.78))
    assert none_64["predicted"] < none_128["predicted"] < full_128["predicted"]
    assert none_128["published"] == 0.89
    out_of_reach = against_published(published_steps(), Network(1, 1e-9))
    assert {row["calibrated"] for row in out_of_reach} == {None}


def test_the_measured_study_is_set_beside_the_prediction() -> None:
    row = {"scaling": "weak", "ranks": 2, "batch_size": 50, "FULL": {"trials": [900, 800, 990]}}
    row |= {"COMPUTE": {"mean": 1000, "trials": [1000, 1000, 1000]}}
    others = [row | {"scaling": "strong"}, row | {"ranks": 1}]
    study = {"rows": [*others, row], "bucket_bytes": [9e6, 1e6]}
    (found,) = against_measured(study, {"alpha": 1e-4, "beta": 1e-9})
    assert found["compute_seconds"] == pytest.approx(0.1)
    assert found["no overlap"] == pytest.approx(0.1 / (0.1 + 2 * 2e-4 + 0.01))
    assert found["all_reduce_seconds"] == pytest.approx(2 * 2e-4 + 0.01)
    assert found["full overlap"] == pytest.approx(0.1 / (0.1 + 2e-4 + 0.001))  # of the last bucket alone
    assert (found["measured"].median, found["measured"].lowest, found["measured"].highest) == (0.9, 0.8, 0.99)


@pytest.mark.parametrize(("model", "dataset", "side"), [("mnist_cnn", "mnist", 28), ("resnet18", "cifar10", 32)])
def test_the_buckets_are_those_of_ddp(model: str, dataset: str, side: int) -> None:
    network = build_model(model, dataset)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp_model = DistributedDataParallel(network)
        for _ in range(3):  # after the first step DDP arranges the buckets anew, and later logs them
            ddp_model(torch.ones(2, 1 if dataset == "mnist" else 3, side, side)).sum().backward()
        sizes = ddp_model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    assert ", ".join(map(str, ddp_buckets(network.parameters()))) == sizes


def test_two_ranks_measure_together(user_environment: dict[str, str], tmp_path: Path) -> None:
    flags = ["--max_mib", 0.0625, "--seconds", 0.005, "--out", tmp_path]
    lesson = REPOSITORY / "03_ddp"
    main, other = start_ranks(2, "experiments/allreduce.py", *flags, cwd=lesson, environment=user_environment)
    assert (main.status, other.status) == (0, 0), main.stderr
    assert other.stdout == ""
    assert "all-reduce over 2 ranks, gloo" in main.stdout
    results = json.loads((tmp_path / "allreduce.json").read_text())
    assert [row["bytes"] for row in results["rows"]] == [4096, 16384, 65536]
    for row in results["rows"]:
        assert row["algorithm_gb_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["bus_gb_per_second"] == row["algorithm_gb_per_second"]  # with two ranks the factor is 1
    assert results["alpha"] >= 0
    assert (tmp_path / "allreduce.png").stat().st_size > 10_000


def test_predict_prints_and_plots(run_script: Script, tmp_path: Path) -> None:
    result = run_script("03_ddp/experiments/predict.py", "--out", tmp_path)
    assert result.status == 0, result.stderr
    assert "no overlap       64        78%" in result.stdout
    assert (tmp_path / "predict.png").stat().st_size > 10_000
    results = json.loads((tmp_path / "predict.json").read_text())
    assert list(results["curves"]["batch 64"]) == [str(ranks) for ranks in RANKS[1:]]


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("allreduce", [], "one rank has nothing to add up: torchrun --nproc-per-node 2 experiments/allreduce.py"),
        ("allreduce", ["--max_mib", 0.001], "--max_mib at least four times that size"),
        ("allreduce", ["--seconds", 0], "--seconds must be above 0, got 0"),
        ("allreduce", ["--second", 1], "did you mean --seconds?"),
        ("predict", ["--gb_per_second", 0], "--gb_per_second must be above 0, got 0"),
        ("predict", ["--scaling", "x.json"], "give both --allreduce FILE and --scaling FILE"),
        ("predict", ["--scaling", "x.json", "--allreduce", "y.json"], "cannot read y.json: No such file"),
        ("predict", ["--max_ranks", 1], "--max_ranks 2 or more"),
        ("predict", ["--buckets", 0.5], "--buckets: invalid int value: '0.5'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    run_script: Script, tmp_path: Path, script: str, flags: list, message: str
) -> None:
    result = partial(run_script, f"03_ddp/experiments/{script}.py", "--out", tmp_path)(*flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_files_of_other_scripts_are_refused_in_one_line(run_script: Script, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"rows": []}')
    flags = ("--allreduce", file, "--scaling", file, "--out", tmp_path)
    result = run_script("03_ddp/experiments/predict.py", *flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("are not what allreduce.py and scaling.py write: 'alpha' is missing")
