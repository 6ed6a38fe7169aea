"""``--loader device``: the whole data set in GPU memory as bytes; it is shuffled and augmented there, ahead of time."""

from collections.abc import Iterator

import torch

from workshop.hardware import require_memory
from workshop.loaders.ahead import one_ahead, stream_on, to_gpu
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.loaders.transform import BatchTransform

PIECE = 8192
"""samples that are transformed together: so many that a batch costs hardly any launches of its own"""


class DeviceLoader(BatchLoader):
    """Batches (inputs, targets) that are on the device already: views into large tensors of about `PIECE` samples.

    Raises:
        UserError: the device's memory cannot hold the data set and three transformed pieces of it.
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
        of_a_piece = max(PIECE, batch_sampler.batch_size) * images[0].numel()
        # Beside the data set: three pieces in float32, and while one is computed two more tensors of its size.
        needed = images.nbytes + targets.nbytes + 5 * 4 * min(of_a_piece, images.numel())
        require_memory("device", needed, device, "use --loader memory, or fewer samples with --limit_train")
        self.dataset = images.to(device)
        self.targets = targets.to(device)
        self.batch_sampler = batch_sampler
        self.transform = transform
        self.stream = stream_on(device)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        self.transform.set_epoch(self.batch_sampler.epoch)
        for images, targets, sizes in one_ahead(self._pieces(), self.stream):
            yield from zip(images.split(sizes), targets.split(sizes), strict=True)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """Yield images, targets, and the sizes of the batches that they are to be split into."""
        all_batches = list(self.batch_sampler.batches())
        in_a_piece = max(1, PIECE // self.batch_sampler.batch_size)
        for first in range(0, len(all_batches), in_a_piece):
            batches = all_batches[first : first + in_a_piece]
            order = torch.cat(batches)
            on_device = to_gpu(order, self.dataset.device)
            images = self.transform(self.dataset[on_device], order)
            yield images, self.targets[on_device], [len(batch) for batch in batches]
