"""Rung ``map``: a map-style data set, one sample at a time, put together by DataLoader worker processes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from workshop.loaders.noted import noted
from workshop.loaders.order import EpochOrder, Loader
from workshop.signals import obey_only_parent


class MapLoader(Loader):
    """Batches (inputs, targets) in CPU memory, from a data set that returns one sample by its epoch and index."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: EpochOrder,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        self.sampler = sampler
        self.loader = DataLoader(
            WholeBatches(dataset),
            sampler=sampler,
            batch_size=None,  # a sample of this data set is a batch
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers and num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            worker_init_fn=obey_only_parent,
            generator=torch.Generator(),  # else it draws the workers' seeds from what dropout draws from
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.loader)


class WholeBatches(Dataset):
    """A data set whose samples are batches, each by the epoch and the indices of its samples."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, epoch_and_indices: tuple[int, list[int]]) -> Any:  # noqa: ANN401
        epoch, indices = epoch_and_indices
        with noted():
            return default_collate([self.dataset[epoch, index] for index in indices])


class SeededSamples(Dataset):
    """The samples of a data set, with random transforms that follow from seed, epoch and index alone.

    So it does not matter which rank or worker prepares a sample, and a resumed run sees what it would have seen.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> Any:  # noqa: ANN401
        epoch, index = epoch_and_index
        state = torch.get_rng_state()  # in the training process it is what dropout draws from
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        sample = self.dataset[index]
        torch.set_rng_state(state)
        return sample
