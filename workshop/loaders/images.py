"""The map-style data set of images, which PyTorch's ``DataLoader`` reads one sample at a time (``--loader map``)."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from workshop.datasets import image_dataset
from workshop.seeds import seed_of


class ImageDataset(Dataset):
    """Images and classes as torchvision's data sets give them; ``dataset[epoch, index]`` is one sample.

    A sample is a tensor (C, H, W) float32, augmented at random in training and normalized, and its class, an int. The
    random numbers of a sample depend only on the seed, the epoch and the index. So it does not matter which rank or
    worker prepares it, and a resumed run gets the same samples as one without a stop.

    Args:
        name: ``"mnist"`` or ``"cifar10"``.
        data_dir: folder of all data sets.
        split: ``"train"`` or ``"val"``.
        limit: use this number of samples only.
        seed: of the augmentation.

    Raises:
        UserError: the files are missing or damaged.
    """

    def __init__(self, name: str, data_dir: Path, split: str, limit: int | None = None, seed: int = 0) -> None:
        from torchvision import transforms  # here, because importing torchvision takes longer than importing torch

        source = image_dataset(name)
        images, labels = source.arrays(data_dir, split)
        images, labels = images[:limit], labels[:limit]
        self.images = np.ascontiguousarray(images.permute(0, 2, 3, 1).squeeze(-1))  # PIL: gray images have no channel
        self.labels = labels.tolist()
        self.seed = seed
        self.augment = source.AUGMENT and split == "train"
        random = [transforms.RandomCrop(images.shape[-1], padding=4), transforms.RandomHorizontalFlip()]
        fixed = [transforms.ToTensor(), transforms.Normalize(source.MEAN, source.STD)]
        self.transform = transforms.Compose([*random, *fixed] if self.augment else fixed)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        image = Image.fromarray(self.images[index])
        if not self.augment:
            return self.transform(image), self.labels[index]
        with torch.random.fork_rng(devices=[]):  # without workers, the model's dropout uses this generator too
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
            return self.transform(image), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)
