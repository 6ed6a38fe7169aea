"""The order of the samples: which of them make up each batch of an epoch, on each rank."""

from collections.abc import Iterator
from typing import Protocol

import torch

from workshop.distributed.ranks import Ranks


class EpochOrder:
    """Sample indices of one epoch, batch by batch; also a ``sampler`` for a PyTorch ``DataLoader``.

    That one is told the epoch with each batch: its workers live on and would not hear of it otherwise.

    All ranks shuffle alike, cut the epoch into global batches and take every ``world_size``-th sample of each. So the
    same samples meet in a step however many ranks share it, and nothing is padded or repeated. A last global batch
    with fewer samples than ranks sits out in training, where all ranks must take the same steps; in validation only
    the ranks it is enough for take that step.
    """

    def __init__(self, samples: int, batch_size: int, ranks: Ranks, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self.global_batch_size = batch_size * ranks.world_size
        self.ranks = ranks
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.max_steps: int | None = None
        """end every epoch after so many steps: for measurements that need not go on for a whole one"""
        self.start_step = 0
        """leave out so many steps at the beginning: for a run that goes on in the middle of an epoch"""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; every epoch has its own."""
        self.epoch = epoch

    def order(self) -> torch.Tensor:
        """Return the indices of all samples, (samples,) int64, in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=epoch_generator(self.seed, self.epoch))

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield this rank's indices, (batch_size,) int64, for each step; the last batch may be smaller."""
        for global_batch in self.order().split(self.global_batch_size)[self.start_step : len(self)]:
            yield global_batch[self.ranks.rank :: self.ranks.world_size]

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return ((self.epoch, batch.tolist()) for batch in self.batches())

    def __len__(self) -> int:
        """Return the number of steps in the whole epoch, whatever ``start_step`` leaves out."""
        full, rest = divmod(self.samples, self.global_batch_size)
        enough = self.ranks.world_size if self.shuffle else self.ranks.rank + 1
        steps = full + (rest >= enough)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def full_steps(self) -> int:
        """How many steps of every epoch have a full batch on every rank; the same number on all ranks."""
        return self.samples // self.global_batch_size


class Loader(Protocol):
    """What every rung is: iterating gives one epoch of batches (inputs, targets), len() their number."""

    sampler: EpochOrder

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...

    def __len__(self) -> int:
        return len(self.sampler)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a source of random numbers that are others for every seed and every epoch."""
    # torch's generator uses only the lowest 32 bits of its seed, so the hash mixes both numbers into them.
    return torch.Generator().manual_seed(hash((seed, epoch)))
