"""CIFAR-10: 50,000 + 10,000 colour images of animals and vehicles, 32x32 (Krizhevsky 2009).

The files lie where torchvision's ``CIFAR10(root=data_dir)`` looks for them, ``data_dir/cifar-10-batches-py``: six
pickled dictionaries, each with ``data``, (N, 3072) uint8, and ``labels``, a list of N classes; and one with the names
of the classes. The validation split is what CIFAR-10 calls its test set.

torchvision's class refuses any but the real files and runs whatever they say. What reads them here takes generated ones
too, and lets them build arrays and nothing else (`ArrayUnpickler`).
"""

import pickle
from pathlib import Path
from typing import Any

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

FOLDER = "cifar-10-batches-py"
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
NAMES_FILE, NAMES_KEY = "batches.meta", "label_names"
ALL_FILES = (*FILES["train"], *FILES["val"], NAMES_FILE)

_reconstruct = np.empty(0).__reduce__()[0]
KNOWN = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # as NumPy 1 called it
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / FOLDER


def check(data_dir: Path) -> None:
    """Check that all files are there, as long as they were when they were prepared; takes a few milliseconds.

    Files that the user put there, of which the lengths are not known, are read completely; that takes some tenths of
    a second. What is in the files is checked whenever they are read.

    Raises UserError: they are not; names the file, what is wrong, and the commands that prepare the data.
    """
    with files.with_fix_hint(NAME, data_dir):
        _check_lengths(folder(data_dir))


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole split ("train" or "val").

    Returns: Images (N, 3, 32, 32) uint8, red, green, blue, and labels (N,) int64.

    Raises UserError: files of the split are missing or damaged in any way.
    """
    with files.with_fix_hint(NAME, data_dir):
        return _read_split(folder(data_dir), split)


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless all files are in this folder and hold what they should."""
    for split in FILES:
        _read_split(folder, split)
    _read_names(folder)


def _check_lengths(folder: Path) -> None:
    noted = (files.read_origin(folder) or {}).get("files")
    if isinstance(noted, dict):
        files.check_lengths(folder, noted)
    else:
        check_folder(folder)


def _read_split(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [_read_batch(folder / name) for name in FILES[split]]
    images = np.concatenate([data for data, _ in parts]).reshape(-1, *SAMPLE_SHAPE)
    if len(images) == 0:
        raise UserError(f"{folder}: has no images in {', '.join(FILES[split])}")
    return torch.from_numpy(images), torch.tensor([label for _, labels in parts for label in labels])


def _read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return what one file holds of a split: data (N, 3072) uint8 and N labels."""
    content = read_dictionary(path)
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
    names = read_dictionary(folder / NAMES_FILE).get(NAMES_KEY)
    if not isinstance(names, list) or len(names) != NUM_CLASSES:
        raise UserError(f"{folder / NAMES_FILE}: not such a file, expected a list of {NUM_CLASSES} names of classes")
    return names


class ArrayUnpickler(pickle.Unpickler):
    """Builds NumPy's arrays and Python's own containers, numbers and strings; refuses to look up anything else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Return what a pickle may call; `UnpicklingError` for all else."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"refused to run {module}.{name}")
        return KNOWN[module, name]


def read_dictionary(path: Path) -> dict[str, Any]:
    """Read a file that Python 2 or 3 wrote; `UserError` if it cannot be read, is damaged or holds something else."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle may raise any
        raise UserError(f"{path}: damaged, or not such a file ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not such a file, expected a dictionary, found {type(content).__name__}")
    return content
