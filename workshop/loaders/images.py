"""Rung ``map``: a map-style data set, one sample at a time, put together by DataLoader worker processes."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from workshop.datasets import ImageDataSet
from workshop.loaders.order import EpochOrder, Loader
from workshop.signals import obey_only_parent

NOTES = "WORKSHOP_WORKER_NOTES"
"""environment variable with the folder where workers note how long each batch took them; not set, they do not"""


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
    """A data set whose samples are batches, each by the epoch and the indices of what is in it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, epoch_and_indices: tuple[int, list[int]]) -> Any:  # noqa: ANN401
        began = time.time_ns()
        epoch, indices = epoch_and_indices
        batch = default_collate([self.dataset[epoch, index] for index in indices])
        worker, folder = get_worker_info(), os.environ.get(NOTES)
        if worker and folder:
            with suppress(FileNotFoundError), Path(folder, f"worker {worker.id}").open("a") as notes:
                notes.write(f"{began} {time.time_ns()}\n")  # the folder goes when nobody wants to know any more
        return batch


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


class Pictures(Dataset):
    """Images and classes as torchvision's data sets give them: a PIL image, augmented and normalised, and an int."""

    def __init__(self, dataset: ImageDataSet, data_dir: Path, split: str) -> None:
        from torchvision import transforms  # here: torchvision takes longer to import than torch itself

        images, labels = dataset.arrays(data_dir, split)
        self.images = np.ascontiguousarray(images.permute(0, 2, 3, 1).squeeze(-1))  # PIL: grey has no channel
        self.labels = labels.tolist()
        random = [transforms.RandomCrop(images.shape[-1], padding=4), transforms.RandomHorizontalFlip()]
        steps = random if dataset.AUGMENT and split == "train" else []
        steps += [transforms.ToTensor(), transforms.Normalize(dataset.MEAN, dataset.STD)]
        self.transform = transforms.Compose(steps)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)
