"""Rung ``map``: a map-style data set, one sample at a time, put together by DataLoader worker processes."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from workshop.loaders.order import EpochOrder


class MapLoader:
    """Batches (inputs, targets) in CPU memory, from a data set that returns one sample by its index."""

    def __init__(self, dataset: Dataset, sampler: EpochOrder, num_workers: int, pin_memory: bool) -> None:
        self.sampler = sampler
        self.loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.sampler)
