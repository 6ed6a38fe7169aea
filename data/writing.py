"""Writing the files of the data sets as the modules of `workshop.datasets` read them."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import torch

from workshop.datasets import cifar10, mnist


def write_mnist(folder: Path, split: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write images (N, 28, 28) uint8 and labels (N,) uint8 into new files."""
    magics = mnist.IMAGES_MAGIC, mnist.LABELS_MAGIC
    for path, magic, array in zip(mnist.paths_of(folder, split), magics, (images, labels), strict=True):
        header = np.array([magic, *array.shape], dtype=">u4").tobytes()
        path.write_bytes(header + array.numpy().tobytes())


def write_cifar10(folder: Path, split: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write images (N, 3, 32, 32) uint8 and labels (N,) int64 into new files."""
    names = cifar10.FILES[split]
    image_parts = np.array_split(images.flatten(1).numpy(), len(names))
    label_parts = np.array_split(labels.numpy(), len(names))
    for name, data, targets in zip(names, image_parts, label_parts, strict=True):
        content = {"batch_label": name, "data": data, "labels": targets.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def write_cifar10_names(folder: Path, names: Sequence[str]) -> None:
    """Write the names of the classes into a new file."""
    (folder / cifar10.NAMES_FILE).write_bytes(pickle.dumps({cifar10.NAMES_KEY: list(names)}, protocol=4))


def write_box(path: Path, nbody: torch.Tensor, hydro: torch.Tensor, attributes: Mapping[str, object]) -> None:
    """Write the fields (4, n, n, n) and (5, n, n, n), both float32, into a new file."""
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
        file.create_dataset("Nbody", data=nbody.numpy())
        file.create_dataset("Hydro", data=hydro.numpy())
