"""Turn stored bytes into inputs of a model, a whole batch at once: augment, scale, normalize."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workshop.loaders.ahead import to_gpu
from workshop.loaders.sampler import epoch_generator

PADDING = 4
"""pixels by which an augmented image may be shifted, as is customary for CIFAR-10"""


class BatchTransform:
    """Turn images (N, C, H, W) uint8 into normalized float32; while augmenting, flip and shift each at random.

    The augmentation of a sample depends only on the seed, the epoch, the sample's index and the number of samples. So
    it is the same on any rank, in any worker and batch, and in a resumed run.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], augment: bool, samples: int, seed: int) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)
        self.augment = augment
        self.samples = samples
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose for every sample what is done to it in this epoch."""
        generator = epoch_generator(self.seed, epoch)
        self.flips = torch.rand(self.samples, generator=generator) < 0.5
        self.shifts = torch.randint(0, 2 * PADDING + 1, (self.samples, 2), generator=generator)

    def __call__(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Transform the samples ``indices`` (N,) of the data set, on the device that ``images`` are on."""
        if self.augment:
            images = flip_and_crop(images, self.flips[indices], self.shifts[indices])
        mean, std = to_gpu(self.mean, images.device), to_gpu(self.std, images.device)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)


def flip_and_crop(images: torch.Tensor, flips: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Mirror the images where ``flips``, and cut each from its zero-padded self at ``shifts``.

    Args:
        images: (N, C, H, W).
        flips: (N,) bool.
        shifts: (N, 2) int64, rows and columns from the top left of the padded image, each 0..2 * PADDING.

    Returns: Images (N, C, H, W).
    """
    n, _, height, width = images.shape
    flips, shifts = to_gpu(flips, images.device), to_gpu(shifts, images.device)
    padded = F.pad(images, [PADDING] * 4)
    rows = shifts[:, 0, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(n, width)
    columns = shifts[:, 1, None] + torch.where(flips[:, None], width - 1 - columns, columns)
    sample = torch.arange(n, device=images.device)[:, None, None]
    # advanced indices on both sides of the channel axis put it last
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
