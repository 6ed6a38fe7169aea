"""MNIST: 60,000 + 10,000 grey images of handwritten digits, 28x28 (LeCun, Cortes and Burges).

The files lie where torchvision's ``MNIST(root=data_dir)`` looks for them, ``data_dir/MNIST/raw``, in the IDX format:
a big-endian header (a magic number that tells type and dimensions, then the size of each dimension), then the bytes.
The validation split is what MNIST calls its test set.
"""

import gzip
import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torchvision import transforms
from torchvision.datasets import MNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from workshop.datasets import digits, files
from workshop.datasets.drawing import complete_recipe
from workshop.errors import UserError

NAME = "mnist"
NUM_CLASSES = 10
SAMPLE_SHAPE = (1, 28, 28)
MEAN = (0.1307,)
STD = (0.3081,)
AUGMENT = False
RECIPE = {"seed": 0, "train_samples": 60_000, "val_samples": 10_000}

FILE_PREFIX = {"train": "train", "val": "t10k"}
IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801  # unsigned bytes, in 3 dimensions and in 1


def check(data_dir: Path) -> None:
    """Check that the files of both splits are there, whole and consistent; takes a few milliseconds.

    Raises:
        UserError: they are not; names the file, what is wrong, and the commands that bring the data.
    """
    try:
        _check_folder(_raw_folder(data_dir))
    except UserError as error:
        real = files.prepare_command(NAME, data_dir)
        synthetic = files.prepare_command(NAME, data_dir, "--synthetic")
        raise UserError(f"{error}; to bring MNIST run `{real}`, or without a network `{synthetic}`") from None


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val").

    Returns:
        Images (N, 1, 28, 28) uint8 and labels (N,) int64.

    Raises:
        UserError: as `check`, or there is no such split.
    """
    images, labels = _checked_paths(data_dir, split)
    return read_image_file(str(images))[:, None], read_label_file(str(labels))


def dataset(data_dir: Path, split: str) -> MNIST:
    """Open a split ("train" or "val") with torchvision's reader and the transforms of the classic MNIST example.

    Returns:
        A map-style data set of pairs: image (1, 28, 28) float32, normalised by `MEAN` and `STD`, and label, an int.

    Raises:
        UserError: as `check`, or there is no such split.
    """
    _checked_paths(data_dir, split)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return MNIST(data_dir, train=split == "train", transform=transform)


def download(data_dir: Path) -> None:
    """Download the real MNIST, from the mirrors and with the checksums that torchvision knows.

    Raises:
        UserError: no mirror delivers it, or other data are in its place (see `files.fill_folder`).
    """
    synthetic = files.prepare_command(NAME, data_dir, "--synthetic")

    def write(folder: Path) -> None:
        for name, md5 in MNIST.resources:
            packed = folder / name
            try:
                files.download([mirror + name for mirror in MNIST.mirrors], packed, md5)
            except UserError as error:
                raise UserError(f"{error}; without a network `{synthetic}` draws stand-in data") from None
            with gzip.open(packed) as source, files.synced(packed.with_suffix("")) as target:
                shutil.copyfileobj(source, target)
            packed.unlink()

    origin = {"origin": "downloaded", "md5": dict(MNIST.resources)}
    files.fill_folder(_raw_folder(data_dir), origin, _check_folder, write)


def generate(
    data_dir: Path, train_samples: int | None = None, val_samples: int | None = None, seed: int | None = None
) -> None:
    """Draw digits (see `digits`) into the files of MNIST; the same arguments give the same bytes.

    Args:
        data_dir: Root folder of the data sets.
        train_samples: To draw. None: as many as generated there before, else 60,000.
        val_samples: To draw. None: as many as generated there before, else 10,000.
        seed: Both splits draw from it, independently of each other. None: the one used there before, else 0.

    Raises:
        UserError: fewer than one sample or a seed outside 0..2^32-1 asked for, or other data are in its place (see
            `files.fill_folder`).
    """
    folder = _raw_folder(data_dir)
    asked = {"seed": seed, "train_samples": train_samples, "val_samples": val_samples}
    recipe = complete_recipe(folder, RECIPE, asked)

    def write(folder: Path) -> None:
        _write_split(folder, "train", *digits.draw_digits(recipe["train_samples"], 2 * recipe["seed"]))
        _write_split(folder, "val", *digits.draw_digits(recipe["val_samples"], 2 * recipe["seed"] + 1))

    origin = {"origin": "generated", **recipe, "version": digits.VERSION}
    files.fill_folder(folder, origin, _check_folder, write)


def _raw_folder(data_dir: Path) -> Path:
    return Path(data_dir) / "MNIST" / "raw"


def _paths(folder: Path, split: str) -> tuple[Path, Path]:
    """Return the paths of a split's images and labels."""
    if split not in FILE_PREFIX:
        raise UserError(f"no split {split!r}: it is 'train' or 'val'")
    prefix = FILE_PREFIX[split]
    return folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"


def _checked_paths(data_dir: Path, split: str) -> tuple[Path, Path]:
    check(data_dir)
    return _paths(_raw_folder(data_dir), split)


def _write_split(folder: Path, split: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    for path, magic, array in zip(_paths(folder, split), (IMAGES_MAGIC, LABELS_MAGIC), (images, labels), strict=True):
        with files.synced(path) as file:
            file.write(np.array([magic, *array.shape], dtype=">u4").tobytes())
            file.write(array.numpy().tobytes())


def _check_folder(folder: Path) -> None:
    """Raise `UserError` unless the files of both splits are in this folder, whole and consistent."""
    try:
        pairs = [_paths(folder, split) for split in FILE_PREFIX]
        missing = [path.name for pair in pairs for path in pair if not path.is_file()]
        if missing:
            raise UserError(f"{folder}: has no {', '.join(missing)}")
        for images, labels in pairs:
            _check_pair(images, labels)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


def _check_pair(images: Path, labels: Path) -> None:
    count, *size = _check_shape(images, IMAGES_MAGIC, dimensions=3)
    (label_count,) = _check_shape(labels, LABELS_MAGIC, dimensions=1)
    if size != [28, 28]:
        raise UserError(f"{images}: images of {size[0]}x{size[1]} pixels, expected 28x28")
    if count != label_count:
        raise UserError(f"{images} has {count} images, but {labels} has {label_count} labels")
    if count == 0:
        raise UserError(f"{images}: has no images")
    values = np.fromfile(labels, dtype=np.uint8, offset=8)
    if values.max() >= NUM_CLASSES:
        position = int(np.argmax(values >= NUM_CLASSES))
        raise UserError(f"{labels}: label {position} (counted from 0) is {values[position]}, expected 0..9")


def _check_shape(path: Path, magic: int, dimensions: int) -> list[int]:
    """Return the sizes in an IDX file's header, having compared magic number and length of the file with them."""
    length, header_length = os.path.getsize(path), 4 + 4 * dimensions
    with open(path, "rb") as file:
        header = file.read(header_length)
    if len(header) < header_length:
        raise UserError(f"{path}: truncated, expected at least {header_length} bytes of header, found {length} bytes")
    found, *shape = np.frombuffer(header, dtype=">u4").tolist()
    if found != magic:
        raise UserError(f"{path}: not such an IDX file, expected magic number {magic:#010x}, found {found:#010x}")
    expected = header_length + math.prod(shape)
    if length != expected:
        problem = "truncated" if length < expected else "overlong"
        raise UserError(f"{path}: {problem}, expected {expected} bytes, found {length} bytes")
    return shape
