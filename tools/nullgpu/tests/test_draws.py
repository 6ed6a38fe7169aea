"""What `nullgpu --values` promises of random numbers: seeds, states, generators, graphs, recomputation."""

import json
from pathlib import Path

import pytest

from conftest import Run

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, nullgpu: Run) -> dict:
    """What `draws.py` has found."""
    file = tmp_path_factory.mktemp("draws") / "found.json"
    done = nullgpu("--gpus", 2, "--values", "python", HERE / "draws.py", file, NULLGPU_STRICT="1")
    assert done.status == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_the_same_seed_draws_the_same_numbers_and_another_seed_others(found: dict) -> None:
    assert (found["same_seed"], found["other_seed"]) == ([], [])


def test_a_restored_state_draws_the_same_numbers(found: dict) -> None:
    assert found["restored_state"] == []


def test_a_fork_of_the_generators_leaves_them_as_they_were(found: dict) -> None:
    assert found["forked"] == []


def test_the_random_numbers_of_the_cpu_are_left_alone(found: dict) -> None:
    assert found["cpu_untouched"] == []
    assert found["beside_a_thread"]


def test_a_generator_of_the_user_has_its_own_numbers(found: dict) -> None:
    assert found["own_generator"] == []


def test_each_gpu_has_a_generator(found: dict) -> None:
    assert found["gpus"] == [True, True, True]


def test_replays_of_a_graph_draw_what_is_drawn_without_a_graph(found: dict) -> None:
    assert found["as_in_graph"] == []
    assert found["own_generator_in_graph"]


def test_the_numbers_have_the_distribution_that_was_asked_for(found: dict) -> None:
    wanted = {"dropped": 0.3, "mean of dropout": 1, "mean of randn": 0, "deviation of randn": 1, "mean of rand": 0.5}
    wanted |= {"mean of normal": 3, "deviation of normal": 2}
    assert found["shares"] == pytest.approx(wanted, abs=0.02)


def test_a_mistake_that_a_gpu_would_end_is_an_error(found: dict) -> None:
    assert found["mistakes"] == []


def test_recomputed_dropout_is_the_first_one(found: dict) -> None:
    assert found["recomputed"] == []


def test_gradients_through_dropout_are_those_of_the_loss(found: dict) -> None:
    for name, (from_gradient, from_losses) in found["slopes"].items():
        assert from_losses == pytest.approx(from_gradient, rel=0.01, abs=0.01), name


def test_each_kernel_of_attention_drops_the_same_weights_in_backward(found: dict) -> None:
    assert found["attention_kernels"] == []
