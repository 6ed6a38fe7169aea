"""``--loader device``: the whole data set in GPU memory as bytes; each epoch is augmented and shuffled there."""

from collections.abc import Iterator

import torch

from workshop.hardware import require_memory
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.loaders.transform import BatchTransform


class DeviceLoader(BatchLoader):
    """Batches (inputs, targets) that are on the device already: views into one large tensor per epoch.

    Raises:
        UserError: the device's memory cannot hold the data set and a transformed epoch of it.
    """

    batch_sampler: DistributedBatchSampler

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        batch_sampler: DistributedBatchSampler,
        transform: BatchTransform,
        device: torch.device,
    ) -> None:
        epoch_values = images.numel() // batch_sampler.num_replicas
        # Beside the data set: a transformed epoch in float32, and while it is computed two more tensors of its size.
        needed = images.nbytes + targets.nbytes + 3 * 4 * epoch_values
        require_memory("device", needed, device, "use --loader memory, or fewer samples with --limit_train")
        self.dataset = images.to(device)
        self.targets = targets.to(device)
        self.batch_sampler = batch_sampler
        self.transform = transform

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        self.transform.set_epoch(self.batch_sampler.epoch)
        batches = list(self.batch_sampler.batches())
        if not batches:
            return
        order = torch.cat(batches)
        on_device = order.to(self.dataset.device)
        images = self.transform(self.dataset[on_device], order)
        sizes = [len(batch) for batch in batches]
        yield from zip(images.split(sizes), self.targets[on_device].split(sizes), strict=True)
