"""Images one at a time, as torchvision's data sets give them: a PIL image and its class, transformed."""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class Pictures(Dataset):
    """Pairs of an image (C, H, W) float32, normalised, and its class, an int; shifted and flipped if ``augment``.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64.
        mean: of each channel, on a scale where white is 1; ``std`` likewise.
        std: standard deviation of each channel.
        augment: whether an image is another one each time.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], augment: bool
    ) -> None:
        from torchvision import transforms  # here: it takes longer to import than torch itself

        size = images.shape[-1]
        random = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip()] if augment else []
        self.transform = transforms.Compose([*random, transforms.ToTensor(), transforms.Normalize(mean, std)])
        self.images = np.ascontiguousarray(images.permute(0, 2, 3, 1).squeeze(-1))  # PIL: grey has no channel
        self.labels = labels.tolist()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)
