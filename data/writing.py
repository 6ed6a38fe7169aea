"""Writing the files of the data sets as the modules of `workshop.datasets` read them."""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import torch

from workshop.datasets import cifar10, mnist, shards
from workshop.errors import UserError


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; its content is on disk, not only in a cache, when the ``with`` block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_mnist(folder: Path, split: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write images (N, 28, 28) uint8 and labels (N,) uint8 into new files."""
    magics = mnist.IMAGES_MAGIC, mnist.LABELS_MAGIC
    for path, magic, array in zip(mnist.paths_of(folder, split), magics, (images, labels), strict=True):
        with synced(path) as file:
            file.write(np.array([magic, *array.shape], dtype=">u4").tobytes())
            file.write(array.numpy().tobytes())


def write_cifar10(folder: Path, split: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write images (N, 3, 32, 32) uint8 and labels (N,) int64 into new files."""
    names = cifar10.FILES[split]
    image_parts = np.array_split(images.flatten(1).numpy(), len(names))
    label_parts = np.array_split(labels.numpy(), len(names))
    for name, data, targets in zip(names, image_parts, label_parts, strict=True):
        content = {"batch_label": name, "data": data, "labels": targets.tolist()}
        write_dictionary(folder / name, content)


def write_cifar10_names(folder: Path, names: Sequence[str]) -> None:
    """Write the names of the classes into a new file."""
    write_dictionary(folder / cifar10.NAMES_FILE, {cifar10.NAMES_KEY: list(names)})


def write_dictionary(path: Path, content: dict[str, Any]) -> None:
    """Write a new pickle file; it is on disk on return."""
    with synced(path) as file:
        pickle.dump(content, file, protocol=4)


def write_box(path: Path, nbody: torch.Tensor, hydro: torch.Tensor, attributes: Mapping[str, object]) -> None:
    """Write the fields (4, n, n, n) and (5, n, n, n), both float32, into a new file."""
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
        file.create_dataset("Nbody", data=nbody.numpy())
        file.create_dataset("Hydro", data=hydro.numpy())
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def write_shards(folder: Path, split: str, images: torch.Tensor, targets: torch.Tensor) -> None:
    """Pack images (N, C, H, W) uint8 and classes (N,) int64 into new files.

    Raises:
        UserError: WebDataset is not installed.
    """
    try:
        import webdataset as wds
    except ImportError:
        raise UserError("--shards needs WebDataset: pip install webdataset") from None
    for shard in range(shards.SHARDS):
        with synced(shards.shard_path(folder, split, shard)) as file, wds.TarWriter(file, mtime=0) as tar:
            for i in range(shard, len(images), shards.SHARDS):
                tar.write({"__key__": f"{i:08d}", "npy": images[i].numpy(), "cls": int(targets[i])})
