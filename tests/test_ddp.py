"""Several ranks do what one rank would: gradients, evaluation, samples; and their all-reduces are counted."""

import json

import pytest

from conftest import REPOSITORY
from ranks import start_ranks


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def facts(request: pytest.FixtureRequest) -> dict:
    """What this number of ranks found together; see ddp_facts.py."""
    script = REPOSITORY / "tests" / "ddp_facts.py"
    results = start_ranks(request.param, script, REPOSITORY / "03_ddp" / "train.py", cwd=REPOSITORY)
    assert [result.status for result in results] == [0] * request.param, results
    assert [result.stdout for result in results[1:]] == [""] * (request.param - 1)
    return json.loads(results[0].stdout) | {"world_size": request.param}


def test_gradients_are_those_of_one_rank(facts: dict) -> None:
    assert facts["gradient_error"] <= 1e-6


def test_evaluation_counts_every_sample_once(facts: dict) -> None:
    counted, correct = facts["correct answers"]
    assert counted == correct
    assert facts["val_loss"][0] == pytest.approx(facts["val_loss"][1], rel=1e-5)
    assert facts["batches in validation"] == ([11, 11] if facts["world_size"] == 2 else [6, 6, 6, 5])


def test_an_epoch_shows_each_sample_to_one_rank(facts: dict) -> None:
    for epoch in ("epoch 1", "epoch 2"):
        assert sorted(index for rank in facts[epoch] for index in rank) == list(range(103))
    assert facts["epoch 1"] != facts["epoch 2"]


def test_bytes_are_those_of_the_parameters(facts: dict) -> None:
    assert facts["all_reduces_per_step"] == 1
    assert facts["all_reduce_bytes_per_step"] == 4 * facts["parameters"]


def test_bucket_sizes_decide_the_number_of_all_reduces(facts: dict) -> None:
    assert facts["buckets of 1 MiB"] == [6, 6]
    assert facts["buckets of 2 MiB"] == [3, 6]
    assert facts["buckets of 100 MiB"] == [1, 6]


def test_without_communication(facts: dict) -> None:
    assert facts["without communication"] == {"all_reduces_per_step": 0, "all_reduce_bytes_per_step": 0}
    assert facts["own gradients"]


def test_with_a_barrier_loader_no_rank_gets_ahead_of_another(facts: dict) -> None:
    asked, got = (zip(*facts[what], strict=True) for what in ("asked for a batch", "got it"))  # by step
    assert all(max(asked_in_step) <= min(got_in_step) for asked_in_step, got_in_step in zip(asked, got, strict=True))


def test_the_longest_time_of_all_ranks_counts(facts: dict) -> None:
    assert facts["longest"] == [facts["world_size"] - 1] * facts["world_size"]
