"""CIFAR-10: 50,000 + 10,000 colour images of animals and vehicles, 32x32 (Krizhevsky 2009).

The files lie where torchvision's ``CIFAR10(root=data_dir)`` looks for them, ``data_dir/cifar-10-batches-py``: six
pickled dictionaries, each with ``data``, (N, 3072) uint8, and ``labels``, a list of N classes; and one with the names
of the classes. The validation split is what CIFAR-10 calls its test set.

torchvision's class refuses any but the real files and runs whatever they say. What reads them here takes generated ones
too, and lets them build arrays and nothing else (see `pickles`).
"""

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torchvision import transforms
from torchvision.datasets import CIFAR10, VisionDataset

from workshop.datasets import files, pickles, pictures
from workshop.datasets.drawing import complete_recipe
from workshop.errors import UserError

NAME = "cifar10"
NUM_CLASSES = 10
SAMPLE_SHAPE = (3, 32, 32)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
AUGMENT = True
RECIPE = {"seed": 0, "train_samples": 50_000, "val_samples": 10_000}

FILES = {"train": [name for name, _ in CIFAR10.train_list], "val": [name for name, _ in CIFAR10.test_list]}
NAMES_FILE = CIFAR10.meta["filename"]
ALL_FILES = (*FILES["train"], *FILES["val"], NAMES_FILE)
LENGTHS_FILE = "LENGTHS.json"  # bytes of each file when it was brought here


def check(data_dir: Path) -> None:
    """Check that all files are there, as long as they were when they were brought; takes a few milliseconds.

    Files of the user's own, of which no lengths are on record, are read through; that takes some tenths of a second.
    What is in the files is checked whenever they are read.

    Raises:
        UserError: they are not; names the file, what is wrong, and the commands that bring the data.
    """
    with _telling_what_mends_it(data_dir):
        _check_lengths(_folder(data_dir))


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val").

    Returns:
        Images (N, 3, 32, 32) uint8, red, green, blue, and labels (N,) int64.

    Raises:
        UserError: there is no such split, or its files are missing or damaged in any way.
    """
    if split not in FILES:
        raise UserError(f"no split {split!r}: it is 'train' or 'val'")
    with _telling_what_mends_it(data_dir):
        return _read_split(_folder(data_dir), split)


def dataset(data_dir: Path, split: str) -> CIFAR10:
    """Open a split ("train" or "val") as torchvision's data set, training images flipped and shifted at random.

    Returns:
        A map-style data set of pairs: image (3, 32, 32) float32, normalised by `MEAN` and `STD`, and label, an int.

    Raises:
        UserError: as `arrays`.
    """
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if split == "train" else []
    transform = transforms.Compose([*augment, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return _ReadByArrays(data_dir, split, transform)


class _ReadByArrays(CIFAR10):
    """torchvision's data set, its files read by `arrays`."""

    def __init__(self, data_dir: Path, split: str, transform: Callable) -> None:
        VisionDataset.__init__(self, data_dir, transform=transform)
        self.train = split == "train"
        images, labels = arrays(data_dir, split)
        self.data = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets = labels.tolist()
        with _telling_what_mends_it(data_dir):
            self.classes = _read_names(_folder(data_dir))
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}


def download(data_dir: Path) -> None:
    """Download the real CIFAR-10, from the address and with the checksum that torchvision knows.

    Raises:
        UserError: it cannot be had, or other data are in its place (see `files.fill_folder`).
    """
    synthetic = files.prepare_command(NAME, data_dir, "--synthetic")

    def write(folder: Path) -> None:
        packed = folder / CIFAR10.filename
        try:
            files.download([CIFAR10.url], packed, CIFAR10.tgz_md5)
        except UserError as error:
            raise UserError(f"{error}; without a network `{synthetic}` draws stand-in data") from None
        # Only the files that are wanted leave the archive, to where we say: no path in it is trusted.
        wanted = {f"{CIFAR10.base_folder}/{name}": folder / name for name in ALL_FILES}
        with tarfile.open(packed) as archive:
            for member in archive:
                if member.isfile() and member.name in wanted:
                    with files.synced(wanted[member.name]) as target:
                        shutil.copyfileobj(archive.extractfile(member), target)
        packed.unlink()
        _write_lengths(folder)

    origin = {"origin": "downloaded", "md5": CIFAR10.tgz_md5}
    files.fill_folder(_folder(data_dir), origin, _check_contents, write)


def generate(
    data_dir: Path, train_samples: int | None = None, val_samples: int | None = None, seed: int | None = None
) -> None:
    """Draw pictures (see `pictures`) into the files of CIFAR-10; the same arguments give the same bytes.

    Args:
        data_dir: Root folder of the data sets.
        train_samples: To draw. None: as many as generated there before, else 50,000.
        val_samples: To draw. None: as many as generated there before, else 10,000.
        seed: Both splits draw from it, independently of each other. None: the one used there before, else 0.

    Raises:
        UserError: fewer than one sample or a seed outside 0..2^32-1 asked for, or other data are in its place (see
            `files.fill_folder`).
    """
    folder = _folder(data_dir)
    asked = {"seed": seed, "train_samples": train_samples, "val_samples": val_samples}
    recipe = complete_recipe(folder, RECIPE, asked)

    def write(folder: Path) -> None:
        for i, (split, names) in enumerate(FILES.items()):
            images, labels = pictures.draw_pictures(recipe[f"{split}_samples"], 2 * recipe["seed"] + i)
            image_parts = np.array_split(images.flatten(1).numpy(), len(names))
            label_parts = np.array_split(labels.numpy(), len(names))
            for name, data, targets in zip(names, image_parts, label_parts, strict=True):
                content = {"batch_label": name, "data": data, "labels": targets.tolist()}
                pickles.write_dictionary(folder / name, content)
        pickles.write_dictionary(folder / NAMES_FILE, {CIFAR10.meta["key"]: list(pictures.NAMES)})
        _write_lengths(folder)

    origin = {"origin": "generated", **recipe, "version": pictures.VERSION}
    files.fill_folder(folder, origin, _check_contents, write)


def _folder(data_dir: Path) -> Path:
    return Path(data_dir) / CIFAR10.base_folder


@contextmanager
def _telling_what_mends_it(data_dir: Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        real = files.prepare_command(NAME, data_dir)
        synthetic = files.prepare_command(NAME, data_dir, "--synthetic")
        raise UserError(f"{error}; to bring CIFAR-10 run `{real}`, or without a network `{synthetic}`") from None


def _write_lengths(folder: Path) -> None:
    lengths = {name: (folder / name).stat().st_size for name in ALL_FILES if (folder / name).exists()}
    with files.synced(folder / LENGTHS_FILE) as file:
        file.write(json.dumps(lengths, indent=2).encode() + b"\n")


def _check_lengths(folder: Path) -> None:
    try:
        lengths = json.loads((folder / LENGTHS_FILE).read_text())
    except (OSError, ValueError):
        lengths = None
    if not isinstance(lengths, dict):
        _check_contents(folder)
        return
    for name in ALL_FILES:
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror}") from error
        if found != lengths.get(name):
            raise UserError(f"{folder / name}: damaged, expected {lengths.get(name)} bytes, found {found} bytes")


def _check_contents(folder: Path) -> None:
    for split in FILES:
        _read_split(folder, split)
    _read_names(folder)


def _read_split(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [_read_batch(folder / name) for name in FILES[split]]
    images = np.concatenate([data for data, _ in parts]).reshape(-1, *SAMPLE_SHAPE)
    if len(images) == 0:
        raise UserError(f"{folder}: has no images in {', '.join(FILES[split])}")
    return torch.from_numpy(images), torch.tensor([label for _, labels in parts for label in labels])


def _read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return what one file holds of a split: data (N, 3072) uint8 and N labels."""
    content = pickles.read_dictionary(path)
    data, labels = content.get("data"), content.get("labels")
    if not isinstance(data, np.ndarray) or not isinstance(labels, list):
        raise UserError(f"{path}: not such a file, expected an array 'data' and a list 'labels'")
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{path}: data {data.shape} {data.dtype}, expected (N, 3072) uint8")
    if len(data) != len(labels):
        raise UserError(f"{path}: has {len(data)} images, but {len(labels)} labels")
    for i, label in enumerate(labels):
        if label not in range(NUM_CLASSES):
            raise UserError(f"{path}: label {i} (counted from 0) is {label}, expected 0..9")
    return data, labels


def _read_names(folder: Path) -> list[str]:
    names = pickles.read_dictionary(folder / NAMES_FILE).get(CIFAR10.meta["key"])
    if not isinstance(names, list) or len(names) != NUM_CLASSES:
        raise UserError(f"{folder / NAMES_FILE}: not such a file, expected a list of {NUM_CLASSES} names of classes")
    return names
