"""The sampler: complete, disjoint between ranks, a new order each epoch, the same however many ranks share it."""

import pytest

from workshop.errors import UserError
from workshop.loaders.sampler import DistributedBatchSampler
from workshop.loaders.shards import SHARDS, ShardSampler

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


def batches_of_ranks(
    samples: int, global_batch_size: int, world_size: int, *, epoch: int = 1, start_step: int = 0, shuffle: bool = True
) -> list[list[list[int]]]:
    """The batches of every rank: indices of samples."""
    result = []
    for rank in range(world_size):
        sampler = DistributedBatchSampler(
            samples, global_batch_size // world_size, rank=rank, num_replicas=world_size, shuffle=shuffle, seed=1
        )
        sampler.set_epoch(epoch, start_step)
        batches = list(sampler)
        assert len(batches) == len(sampler) - start_step
        assert {key_epoch for batch in batches for key_epoch, _ in batch} == {epoch}
        result.append([[index for _, index in batch] for batch in batches])
    return result


@WORLD_SIZES
@pytest.mark.parametrize("samples", [64, 100, 101, 103, 3201])
def test_every_sample_once_in_validation(samples: int, world_size: int) -> None:
    per_rank = batches_of_ranks(samples, 16, world_size, shuffle=False)
    assert sorted(index for batches in per_rank for batch in batches for index in batch) == list(range(samples))


@WORLD_SIZES
@pytest.mark.parametrize("samples", [64, 97, 100, 101, 103, 3201])
def test_every_sample_at_most_once_in_training_and_all_ranks_take_the_same_steps(samples: int, world_size: int) -> None:
    per_rank = batches_of_ranks(samples, 16, world_size)
    seen = [index for batches in per_rank for batch in batches for index in batch]
    assert len(set(seen)) == len(seen) and set(seen) <= set(range(samples))
    assert samples - len(seen) < world_size  # left out only if not every rank can have one
    assert len({len(batches) for batches in per_rank}) == 1
    sampler = DistributedBatchSampler(samples, 16 // world_size, num_replicas=world_size, shuffle=True, seed=1)
    assert sampler.samples_per_epoch == len(seen)  # by which the sum of the losses is divided
    assert all(len(batch) == 16 // world_size for batches in per_rank for batch in batches[: sampler.full_steps])


def test_a_step_holds_the_same_samples_however_many_ranks_share_it() -> None:
    (alone,) = batches_of_ranks(100, 16, 1)
    shared = batches_of_ranks(100, 16, 4)
    for step, batch in enumerate(alone):
        assert [batches[step] for batches in shared] == [batch[rank::4] for rank in range(4)]


def test_every_epoch_and_every_seed_has_its_own_order_which_repeats() -> None:
    orders = []
    for seed in (0, 1, 2, 0, 1, 2):
        sampler = DistributedBatchSampler(100, 16, shuffle=True, seed=seed)
        for epoch in (0, 1, 2):
            sampler.set_epoch(epoch)
            orders.append(tuple(sampler.order().tolist()))
    assert orders[:9] == orders[9:] and len(set(orders)) == 9


@WORLD_SIZES
def test_an_epoch_that_is_resumed_is_the_rest_of_it_on_any_number_of_ranks(world_size: int) -> None:
    (whole,) = batches_of_ranks(100, 16, 1)
    rest = batches_of_ranks(100, 16, world_size, start_step=3)
    for step, batch in enumerate(whole[3:]):
        assert sorted(batch) == sorted(index for batches in rest for index in batches[step])
    sampler = DistributedBatchSampler(100, 16, shuffle=True, seed=1)
    sampler.set_epoch(1, start_step=3)
    sampler.set_epoch(2)
    assert len(list(sampler)) == len(sampler) == 7


@WORLD_SIZES
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
        assert sorted(n for share in shares for n in share) == list(range(samples))
        seen = sum(len(share[: 3 * len(sampler)]) for share, sampler in zip(shares, samplers, strict=True))
        assert {sampler.samples_per_epoch for sampler in samplers} == {seen}
        assert all(len(share) >= 3 * samplers[0].full_steps for share in shares)
        assert len({len(sampler) for sampler in samplers}) == 1


def test_too_few_samples_are_one_line() -> None:
    with pytest.raises(
        UserError, match=r"--batch_size 8 on 2 rank\(s\) needs 16 samples a step, .* only 15 to train on"
    ):
        DistributedBatchSampler(15, 8, num_replicas=2, shuffle=True)
