"""Rung ``device``: the whole data set on the accelerator as bytes; each epoch is augmented and shuffled there."""

from collections.abc import Iterator

import psutil
import torch

from workshop.errors import UserError
from workshop.loaders.order import EpochOrder
from workshop.loaders.transform import BatchTransform


class DeviceLoader:
    """Batches (inputs, targets) that are on the device already: views into one large tensor per epoch.

    Raises:
        UserError: the device's memory cannot hold the data set and a transformed epoch of it.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        sampler: EpochOrder,
        transform: BatchTransform,
        device: torch.device,
    ) -> None:
        epoch_values = images.numel() // sampler.ranks.world_size
        needed = images.nbytes + targets.nbytes + 3 * 4 * epoch_values  # float32: the epoch, and room to make it in
        free = free_bytes(device)
        if needed > free:
            raise UserError(
                f"--loader device needs {needed / 1e9:.2f} GB on {device}, but {free / 1e9:.2f} GB are free; "
                "use --loader memory, or fewer samples with --limit_train"
            )
        self.images = images.to(device)
        self.targets = targets.to(device)
        self.sampler = sampler
        self.transform = transform

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.transform.set_epoch(self.sampler.epoch)
        batches = list(self.sampler.batches())
        if not batches:
            return
        order = torch.cat(batches)
        on_device = order.to(self.images.device)
        images = self.transform(self.images[on_device], order)
        targets = self.targets[on_device]
        sizes = [len(batch) for batch in batches]
        yield from zip(images.split(sizes), targets.split(sizes), strict=True)

    def __len__(self) -> int:
        return len(self.sampler)


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free on ``device``; devices that share the CPU's memory have what is free there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
