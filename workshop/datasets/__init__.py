"""The data sets. Each is one module, which knows its files.

A module of images has ``NAME``, ``NUM_CLASSES``, ``SAMPLE_SHAPE`` (channels, rows, columns), ``MEAN`` and ``STD`` of
the training pixels of each channel (white is 1), ``AUGMENT`` (whether training images are flipped and shifted at
random), and three functions: ``folder(data_dir)``, where its files are; ``arrays(data_dir, split)``, which reads a
whole split as stored, inputs (N, *SAMPLE_SHAPE) uint8 and targets (N,) int64; and ``check(data_dir)``, which raises
`UserError` unless both splits can be read. ``split`` is ``"train"`` or ``"val"``.
"""

import importlib
from types import ModuleType

IMAGES = ("mnist", "cifar10")
"""names of the data sets of images; the volumes of `nbody` are apart, as they need HDF5"""


def image_dataset(name: str) -> ModuleType:
    """Return the module of the data set of images ``name``, which is imported only now."""
    assert name in IMAGES, name
    return importlib.import_module(f"workshop.datasets.{name}")
