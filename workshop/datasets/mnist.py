"""MNIST: 60,000 + 10,000 gray images of handwritten digits, 28x28 (LeCun, Cortes and Burges).

The files lie where torchvision's ``MNIST(root=data_dir)`` looks for them, ``data_dir/MNIST/raw``, in the IDX format:
a big-endian header (a magic number for type and dimensions, then the size of each dimension), then the bytes.
The validation split is what MNIST calls its test set.
"""

import math
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


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / "MNIST" / "raw"


def paths_of(folder: Path, split: str) -> tuple[Path, Path]:
    """Return the paths of a split's images and labels."""
    prefix = FILE_PREFIX[split]
    return folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val").

    Returns: Images (N, 1, 28, 28) uint8 and labels (N,) int64.

    Raises UserError: a file is missing or damaged; names the file, what is wrong, and the commands that prepare it.
    """
    with files.with_fix_hint(NAME, data_dir, folder(data_dir)):
        images_path, labels_path = paths_of(folder(data_dir), split)
        images = _read_idx(images_path, IMAGES_MAGIC, dimensions=3)
        labels = _read_idx(labels_path, LABELS_MAGIC, dimensions=1)
        if images.shape[1:] != SAMPLE_SHAPE[1:]:
            raise UserError(f"{images_path}: images of {images.shape[1]}x{images.shape[2]} pixels, expected 28x28")
        if len(images) != len(labels) or len(images) == 0:
            raise UserError(f"{images_path} has {len(images)} images, and {labels_path} has {len(labels)} labels")
        if labels.max() >= NUM_CLASSES:
            raise UserError(f"{labels_path}: has a label {labels.max()}, expected 0..9")
    return images[:, None], labels.long()


def check(data_dir: Path) -> None:
    """Raise `UserError` unless both splits can be read."""
    for split in FILE_PREFIX:
        arrays(data_dir, split)


def _read_idx(path: Path, magic: int, dimensions: int) -> torch.Tensor:
    """Return what is in an IDX file: a tensor of uint8 of the shape that its header says."""
    content = np.fromfile(path, dtype=np.uint8)
    start = 4 + 4 * dimensions
    header = content[:start].tobytes().ljust(start, b"\0")
    found, *shape = np.frombuffer(header, dtype=">u4").tolist()
    if found != magic:
        raise UserError(f"{path}: damaged, expected magic number {magic:#010x}, found {found:#010x}")
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise UserError(f"{path}: damaged, expected {expected} bytes, found {len(content)} bytes")
    return torch.from_numpy(content[start:]).view(shape)
