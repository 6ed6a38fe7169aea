"""The order of the samples: complete, disjoint between ranks, new each epoch, the same however many ranks share it."""

import pytest
from workshop.distributed.ranks import ONE_PROCESS, Ranks

from workshop.loaders.sampler import EpochOrder


def orders(
    samples: int, global_batch_size: int, world_size: int, epoch: int = 1, shuffle: bool = True
) -> list[list[list[int]]]:
    """The batches of every rank."""
    result = []
    for rank in range(world_size):
        ranks = Ranks(rank=rank, world_size=world_size)
        order = EpochOrder(samples, global_batch_size // world_size, ranks, seed=1, shuffle=shuffle)
        order.set_epoch(epoch)
        batches = [batch for _, batch in order]
        assert len(batches) == len(order)
        result.append(batches)
    return result


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [64, 100, 101, 103])
def test_every_sample_once_in_validation(samples: int, world_size: int) -> None:
    seen = [i for batches in orders(samples, 16, world_size, shuffle=False) for batch in batches for i in batch]
    assert sorted(seen) == list(range(samples))


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    seen = set()
    for seed in (0, 1, 2):
        order = EpochOrder(100, 16, ONE_PROCESS, seed=seed, shuffle=True)
        for epoch in (0, 1, 2):
            order.set_epoch(epoch)
            seen.add(tuple(order.order().tolist()))
    assert len(seen) == 9


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sample_once_in_training(world_size: int) -> None:
    per_rank = orders(100, 16, world_size)
    assert sorted(i for batches in per_rank for batch in batches for i in batch) == list(range(100))
    assert len({len(batches) for batches in per_rank}) == 1


def test_ranks_take_the_same_steps_when_the_rest_is_smaller_than_the_world() -> None:
    per_rank = orders(97, 16, 4)
    assert [len(batches) for batches in per_rank] == [6] * 4
    assert all(len(batch) == 4 for batches in per_rank for batch in batches)


def test_a_step_holds_the_same_samples_however_many_ranks_share_it() -> None:
    alone = orders(100, 16, 1)[0]
    shared = orders(100, 16, 4)
    for step, batch in enumerate(alone):
        assert sorted(batch) == sorted(i for batches in shared for i in batches[step])


def test_epochs_differ_and_repeat() -> None:
    assert orders(100, 16, 1, epoch=1) != orders(100, 16, 1, epoch=2)
    assert orders(100, 16, 1, epoch=1) == orders(100, 16, 1, epoch=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_begun_later_is_the_rest_of_it(world_size: int) -> None:
    for rank in range(world_size):
        ranks = Ranks(rank=rank, world_size=world_size)
        order = EpochOrder(100, 16 // world_size, ranks, seed=1, shuffle=True)
        whole = list(order)
        order.start_step = 3
        assert list(order) == whole[3:]
        assert len(order) == len(whole)
