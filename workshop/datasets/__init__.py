"""The data sets. Each is one module, which knows its files; those of images offer what `ImageSource` lists."""

import importlib
from pathlib import Path
from typing import Protocol, cast

import torch


class ImageSource(Protocol):
    """What the module of a data set of images offers. ``split`` is ``"train"`` or ``"val"``."""

    NAME: str
    """as on the command line"""
    NUM_CLASSES: int
    SAMPLE_SHAPE: tuple[int, ...]
    """of one sample: channels, rows, columns"""
    MEAN: tuple[float, ...]
    """of the training pixels of each channel, on a scale where white is 1"""
    STD: tuple[float, ...]
    """their standard deviation"""
    AUGMENT: bool
    """whether training images are flipped and shifted at random"""

    def folder(self, data_dir: Path) -> Path:
        """Return the folder that the files are in."""
        ...

    def check(self, data_dir: Path) -> None:
        """Raise `UserError`, with the command that fixes it, unless all files are there and sound; takes moments."""
        ...

    def arrays(self, data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole split as stored: inputs (N, *SAMPLE_SHAPE) uint8 and targets (N,) int64."""
        ...


IMAGES = ("mnist", "cifar10")
"""names of the data sets of images; the volumes of `nbody` are apart, as they need HDF5"""


def image_dataset(name: str) -> ImageSource:
    """Return the module of the data set of images ``name``, which is imported only now."""
    assert name in IMAGES, name
    return cast(ImageSource, importlib.import_module(f"workshop.datasets.{name}"))
