"""The sampler: complete, disjoint between ranks, a new order each epoch, the same however many ranks share it."""

import pytest

from workshop.loaders.sampler import DistributedBatchSampler
from workshop.loaders.shards import SHARDS, ShardSampler


def batches_of_ranks(
    samples: int, global_batch_size: int, world_size: int, epoch: int = 1, shuffle: bool = True
) -> list[list[list[int]]]:
    """The batches of every rank: indices of samples."""
    result = []
    for rank in range(world_size):
        sampler = DistributedBatchSampler(
            samples, global_batch_size // world_size, rank=rank, num_replicas=world_size, shuffle=shuffle, seed=1
        )
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert {key_epoch for batch in batches for key_epoch, _ in batch} == {epoch}
        result.append([[index for _, index in batch] for batch in batches])
    return result


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [64, 100, 101, 103])
def test_every_sample_once_in_validation(samples: int, world_size: int) -> None:
    per_rank = batches_of_ranks(samples, 16, world_size, shuffle=False)
    seen = [index for batches in per_rank for batch in batches for index in batch]
    assert sorted(seen) == list(range(samples))


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    seen = set()
    for seed in (0, 1, 2):
        sampler = DistributedBatchSampler(100, 16, shuffle=True, seed=seed)
        for epoch in (0, 1, 2):
            sampler.set_epoch(epoch)
            seen.add(tuple(sampler.order().tolist()))
    assert len(seen) == 9


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sample_once_in_training(world_size: int) -> None:
    per_rank = batches_of_ranks(100, 16, world_size)
    assert sorted(index for batches in per_rank for batch in batches for index in batch) == list(range(100))
    assert len({len(batches) for batches in per_rank}) == 1


def test_ranks_take_the_same_steps_when_the_rest_is_smaller_than_the_world() -> None:
    per_rank = batches_of_ranks(97, 16, 4)
    assert [len(batches) for batches in per_rank] == [6] * 4
    assert all(len(batch) == 4 for batches in per_rank for batch in batches)


def test_a_step_holds_the_same_samples_however_many_ranks_share_it() -> None:
    alone = batches_of_ranks(100, 16, 1)[0]
    shared = batches_of_ranks(100, 16, 4)
    for step, batch in enumerate(alone):
        assert sorted(batch) == sorted(index for batches in shared for index in batches[step])


def test_epochs_differ_and_repeat() -> None:
    assert batches_of_ranks(100, 16, 1, epoch=1) != batches_of_ranks(100, 16, 1, epoch=2)
    assert batches_of_ranks(100, 16, 1, epoch=1) == batches_of_ranks(100, 16, 1, epoch=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_that_starts_later_is_the_rest_of_it(world_size: int) -> None:
    for rank in range(world_size):
        sampler = DistributedBatchSampler(
            100, 16 // world_size, rank=rank, num_replicas=world_size, shuffle=True, seed=1
        )
        whole = list(sampler)
        sampler.start_step = 3
        assert list(sampler) == whole[3:]
        assert len(sampler) == len(whole)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [64, 100, 101, 103, 3201])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_samples_of_an_epoch_are_those_in_the_batches(samples: int, world_size: int, shuffle: bool) -> None:
    """The sum of the losses is divided by their number."""
    sampler = DistributedBatchSampler(samples, 16 // world_size, num_replicas=world_size, shuffle=shuffle, seed=1)
    per_rank = batches_of_ranks(samples, 16, world_size, shuffle=shuffle)
    assert sampler.samples_per_epoch == sum(len(batch) for batches in per_rank for batch in batches)
    sampler.max_steps = 1
    assert sampler.samples_per_epoch > samples - world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [130, 1300])
def test_the_samples_of_an_epoch_of_shards(samples: int, world_size: int) -> None:
    """A rank has `len(sampler)` batches, or fewer samples than fill them."""
    samplers = [
        ShardSampler(samples, 3, rank=rank, num_replicas=world_size, shuffle=True, seed=1) for rank in range(world_size)
    ]
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [[n for shard in s.shards(s.rank) for n in range(shard, samples, SHARDS)] for s in samplers]
        seen = sum(len(share[: 3 * len(sampler)]) for share, sampler in zip(shares, samplers, strict=True))
        assert {sampler.samples_per_epoch for sampler in samplers} == {seen}
