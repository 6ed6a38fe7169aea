"""Samplers (which samples make up each batch, on each rank), and the interface of all loaders."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workshop.errors import UserError
from workshop.seeds import seed_of


class EpochSampler:
    """Base class of the samplers: the samples of one rank in one epoch, from a given step on.

    Args:
        num_samples: size of the data set.
        batch_size: samples per step and rank.
        rank: of this process, from 0 to below ``num_replicas``; None: as in PyTorch's ``DistributedSampler``, that of
            the process group, or 0 if there is none.
        num_replicas: number of ranks that share the samples; None: those of the process group, or 1.
        shuffle: whether this is training: every epoch has a new order, and all ranks take equally many steps.
        seed: the same seed gives the same orders.

    Raises:
        UserError: a training epoch has less than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int | None = None,
        num_replicas: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if in_group else 0
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size() if in_group else 1
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.start_step = 0
        self.max_steps: int | None = None
        """end every epoch after this number of steps: for measurements that do not need a whole one"""
        if shuffle and num_samples < self.global_batch_size:
            raise UserError(
                f"--batch_size {batch_size} on {self.num_replicas} rank(s) needs {self.global_batch_size} samples a "
                f"step, but there are only {num_samples} to train on"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.num_replicas

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch whose order comes next; leave out the steps before ``start_step``, counted from 0."""
        self.epoch = epoch
        self.start_step = start_step

    def steps(self) -> int:
        """Return the number of steps in the whole epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of steps in the whole epoch, also where ``start_step`` leaves some out."""
        return self.steps() if self.max_steps is None else min(self.steps(), self.max_steps)


class DistributedBatchSampler(EpochSampler):
    """Keys of the samples of one epoch, batch by batch: the ``batch_sampler`` of a PyTorch ``DataLoader``.

    All ranks shuffle in the same way, cut the epoch into global batches, and take every ``num_replicas``-th sample
    of each. Therefore a step of the same global batch size has the same samples however many ranks share it. No
    sample is repeated; `torch.utils.data.DistributedSampler` repeats some when the samples cannot be shared evenly.
    If the last global batch has fewer samples than there are ranks, it is left out in training, because all ranks
    must take the same number of steps; in validation (``shuffle=False``) only as many ranks as it has samples take
    that step.

    A key is a pair (epoch, index), because workers that live for several epochs hold a copy of the data set, and would
    not see a `set_epoch` of it.
    """

    def order(self) -> torch.Tensor:
        """Return the indices of all samples, (num_samples,) int64, in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(self.num_samples, generator=epoch_generator(self.seed, self.epoch))

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the indices of this rank's samples, (batch_size,) int64, for each step; the last may have fewer."""
        for global_batch in self.order().split(self.global_batch_size)[self.start_step : len(self)]:
            yield global_batch[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self.epoch, index) for index in batch.tolist()] for batch in self.batches())

    def steps(self) -> int:
        """Return the number of steps in the whole epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        enough = self.num_replicas if self.shuffle else self.rank + 1
        return full + (rest >= enough)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together get in an epoch: all, without a last global batch that is dropped."""
        rest = self.num_samples % self.global_batch_size
        left_out = rest if self.shuffle and rest < self.num_replicas else 0
        return self.num_samples - left_out

    @property
    def full_steps(self) -> int:
        """The number of steps in every epoch that have a full batch on every rank."""
        return self.num_samples // self.global_batch_size


class Loader(Protocol):
    """Interface of every loader, PyTorch's ``DataLoader`` included if its sampler is a `DistributedBatchSampler`.

    Iterating gives one epoch of batches (inputs, targets); ``len(loader)`` is their number, and ``len(loader.dataset)``
    the number of samples of all ranks.
    """

    @property
    def dataset(self) -> Any: ...  # noqa: ANN401, D102

    @property
    def batch_sampler(self) -> Any: ...  # noqa: ANN401, D102

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class BatchLoader:
    """Base class of the loaders that make whole batches themselves instead of collating samples."""

    dataset: Any
    batch_sampler: EpochSampler
    pin_memory = False
    """put batches into memory that a GPU can copy from directly"""
    less_work = "a larger --batch_size"
    """what to try when loading is too slow and no CPU is free for it"""
    can_have_workers = False
    """whether --num_workers can make it faster"""
    always_threaded = False
    """whether it has threads that load, also without workers"""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches (inputs, targets) of one epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, targets in self.batches():
            yield (inputs.pin_memory(), targets.pin_memory()) if self.pin_memory else (inputs, targets)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a source of random numbers that differ for every seed and every epoch."""
    return torch.Generator().manual_seed(seed_of(seed, epoch))
