"""MNIST: 60,000 + 10,000 grey images of handwritten digits, 28x28 (LeCun, Cortes and Burges).

The files lie where torchvision's ``MNIST(root=data_dir)`` looks for them, ``data_dir/MNIST/raw``, in the IDX format:
a big-endian header (a magic number for type and dimensions, then the size of each dimension), then the bytes.
The validation split is what MNIST calls its test set.
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

from workshop.datasets import files
from workshop.errors import UserError

NAME = "mnist"
NUM_CLASSES = 10
SAMPLE_SHAPE = (1, 28, 28)
MEAN = (0.1307,)
STD = (0.3081,)
AUGMENT = False

FILE_PREFIX = {"train": "train", "val": "t10k"}
IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801  # unsigned bytes, in 3 dimensions and in 1
IMAGES_HEADER, LABELS_HEADER = 16, 8  # bytes


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / "MNIST" / "raw"


def check(data_dir: Path) -> None:
    """Check that the files of both splits are there, whole and consistent; takes a few milliseconds.

    Raises UserError: they are not; names the file, what is wrong, and the commands that prepare the data.
    """
    with files.with_fix_hint(NAME, data_dir):
        check_folder(folder(data_dir))


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val") of files that `check` has found sound.

    Returns: Images (N, 1, 28, 28) uint8 and labels (N,) int64.
    """
    images, labels = paths_of(folder(data_dir), split)
    pixels = torch.from_numpy(np.fromfile(images, dtype=np.uint8, offset=IMAGES_HEADER))
    classes = torch.from_numpy(np.fromfile(labels, dtype=np.uint8, offset=LABELS_HEADER))
    return pixels.view(-1, *SAMPLE_SHAPE), classes.long()


def paths_of(folder: Path, split: str) -> tuple[Path, Path]:
    """Return the paths of a split's images and labels."""
    prefix = FILE_PREFIX[split]
    return folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless the files of both splits are in this folder, whole and consistent."""
    try:
        pairs = [paths_of(folder, split) for split in FILE_PREFIX]
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
    values = np.fromfile(labels, dtype=np.uint8, offset=LABELS_HEADER)
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
