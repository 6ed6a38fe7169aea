"""CIFAR-10: 50,000 + 10,000 color images of animals and vehicles, 32x32 (Krizhevsky 2009).

The files lie where torchvision's ``CIFAR10(root=data_dir)`` looks for them, ``data_dir/cifar-10-batches-py``: six
pickled dictionaries, each with ``data``, (N, 3072) uint8, and ``labels``, a list of N classes; and one with the names
of the classes. The validation split is what CIFAR-10 calls its test set. (torchvision's class refuses generated files.)
"""

import pickle
from pathlib import Path

import numpy as np
import torch

from workshop.datasets import files
from workshop.errors import UserError

NAME = "cifar10"
NUM_CLASSES = 10
SAMPLE_SHAPE = (3, 32, 32)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
AUGMENT = True

FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
NAMES_FILE, NAMES_KEY = "batches.meta", "label_names"


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / "cifar-10-batches-py"


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val").

    Returns: Images (N, 3, 32, 32) uint8, red, green, blue, and labels (N,) int64.

    Raises UserError: a file is missing or damaged; names the file, what is wrong, and the commands that prepare it.
    """
    with files.with_fix_hint(NAME, data_dir, folder(data_dir)):
        parts = [_read_batch(folder(data_dir) / name) for name in FILES[split]]
    images = np.concatenate([data for data, _ in parts]).reshape(-1, *SAMPLE_SHAPE)
    return torch.from_numpy(images), torch.tensor([label for _, labels in parts for label in labels])


def check(data_dir: Path) -> None:
    """Raise `UserError` unless both splits can be read."""
    for split in FILES:
        arrays(data_dir, split)


def _read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return what is in one file of a split: data (N, 3072) uint8 and N labels."""
    with open(path, "rb") as file:
        try:
            content = pickle.load(file, encoding="latin1")  # Python 2 wrote the real files
            data, labels = content["data"], content["labels"]
        except Exception as error:  # a damaged pickle may raise any
            raise UserError(f"{path}: damaged, or not such a file ({error})") from None
    if data.dtype != np.uint8 or data.shape != (len(labels), 3072) or not set(labels) <= set(range(NUM_CLASSES)):
        raise UserError(
            f"{path}: has data {data.shape} {data.dtype} and {len(labels)} labels, expected (N, 3072) uint8 and N "
            "labels in 0..9"
        )
    return data, labels
