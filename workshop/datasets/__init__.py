"""The data sets by name. Each is one module, and all offer what `DataSet` lists."""

from pathlib import Path
from typing import Protocol

import torch
from torch.utils.data import Dataset

from workshop.datasets import cifar10, mnist, nbody
from workshop.paths import default_data_dir

__all__ = ["DATASETS", "IMAGES", "DataSet", "ImageDataSet", "default_data_dir"]


class DataSet(Protocol):
    """What the module of every data set offers. ``split`` is ``"train"`` or ``"val"``."""

    NAME: str
    """as on the command line"""
    NUM_CLASSES: int | None
    """None where a model has to predict volumes, not classes"""
    SAMPLE_SHAPE: tuple[int, ...]
    """of one sample: channels, rows, columns (and layers); volumes may be cut to other sizes"""
    RECIPE: dict[str, int]
    """what `generate` may be told, and what it does unless told"""

    def check(self, data_dir: Path) -> None:
        """Raise `UserError`, saying which command mends it, unless all files are there and sound; takes moments."""

    def download(self, data_dir: Path) -> None:
        """Bring the real data into ``data_dir``, unless they are there."""

    def generate(self, data_dir: Path, **recipe: int | None) -> None:
        """Draw stand-in data, in the files of the real ones; None: as in those drawn there before, else the usual."""


class ImageDataSet(DataSet, Protocol):
    """What the module of a data set of images offers besides."""

    MEAN: tuple[float, ...]
    """of the training pixels of each channel, on a scale where white is 1"""
    STD: tuple[float, ...]
    """likewise"""
    AUGMENT: bool
    """whether training images are flipped and shifted at random"""

    def arrays(self, data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole split undecorated: inputs (N, *SAMPLE_SHAPE) uint8 and targets (N,) int64."""

    def dataset(self, data_dir: Path, split: str) -> Dataset:
        """Return the split as a map-style data set of normalised samples, as the plain recipe has it."""


IMAGES: dict[str, ImageDataSet] = {module.NAME: module for module in (mnist, cifar10)}
DATASETS: dict[str, DataSet] = IMAGES | {nbody.NAME: nbody}
