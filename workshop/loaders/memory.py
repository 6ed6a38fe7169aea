"""``--loader memory``: the whole data set decoded into CPU memory once, each batch made by indexing."""

from collections.abc import Iterator

import torch

from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.loaders.transform import BatchTransform


class MemoryLoader(BatchLoader):
    """Batches (inputs, targets) in CPU memory, from arrays in CPU memory; needs no workers."""

    less_work = "--loader device"
    batch_sampler: DistributedBatchSampler

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        batch_sampler: DistributedBatchSampler,
        transform: BatchTransform,
        pin_memory: bool,
    ) -> None:
        self.dataset = images
        self.targets = targets
        self.batch_sampler = batch_sampler
        self.transform = transform
        self.pin_memory = pin_memory

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        self.transform.set_epoch(self.batch_sampler.epoch)
        for indices in self.batch_sampler.batches():
            yield self.transform(self.dataset[indices], indices), self.targets[indices]
