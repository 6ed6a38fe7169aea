"""N-body boxes: from the dark matter of a simulation to the gas in it, a map from volumes to volumes.

Each split is one HDF5 file, ``data_dir/nbody/train.h5`` and ``val.h5``, with two fields of float32: ``Nbody``
(4, n, n, n), density contrast and three components of the velocity, and ``Hydro`` (5, n, n, n), the same of the gas and
its temperature contrast. Channel 1 is the velocity along the first axis of the volume, and so on. If the file has the
attribute ``periodic`` and it is true, the box continues at its opposite side. The names of the fields are those of the
files that NERSC's tutorial "Deep Learning at Scale" reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from workshop.datasets import files
from workshop.errors import UserError

NAME = "nbody"
INPUT_CHANNELS = 4
TARGET_CHANNELS = 5

SPLITS = ("train", "val")
CHANNELS = {"Nbody": INPUT_CHANNELS, "Hydro": TARGET_CHANNELS}
VELOCITY = (1, 2, 3)
"""channels of both fields that hold the velocity along the first, second and third axis of the volume"""


@dataclass(frozen=True)
class Box:
    """What is known about a file before its values are read."""

    path: Path
    cells: int
    """along each edge"""
    periodic: bool


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / NAME


def path_of(folder: Path, split: str) -> Path:
    """Return the path of the file of a split."""
    return folder / f"{split}.h5"


def box(data_dir: Path, split: str) -> Box:
    """Return what the file of a split ("train" or "val") holds, without reading its values.

    Raises UserError: the file is missing, damaged or of another layout; names the commands that prepare it.
    """
    with files.with_fix_hint(NAME, data_dir, folder(data_dir)):
        path = path_of(folder(data_dir), split)
        path.stat()  # a missing file has an error of its own
        try:
            with h5py.File(path) as file:
                fields = {name: file[name] for name in CHANNELS}
                cells = fields["Nbody"].shape[-1]
                for name, channels in CHANNELS.items():
                    if fields[name].shape != (channels, cells, cells, cells) or fields[name].dtype != np.float32:
                        raise UserError(
                            f"{path}: {name} has {fields[name].dtype} of shape {fields[name].shape}, expected float32 "
                            f"of shape ({channels}, n, n, n), with the same n in {' and '.join(CHANNELS)}"
                        )
                return Box(path, cells, periodic=bool(file.attrs.get("periodic", False)))
        except (OSError, KeyError) as error:
            raise UserError(f"{path}: damaged, or not such an HDF5 file ({error})") from None


def arrays(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the whole box of a split ("train" or "val"): Nbody (4, n, n, n) and Hydro (5, n, n, n), both float32.

    Raises UserError: as `box`, or some values are not finite numbers.
    """
    return read(box(data_dir, split), torch.device("cpu"))


def read(box: Box, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole box onto ``device``; see `arrays`."""
    fields = {name: torch.empty(channels, *[box.cells] * 3, device=device) for name, channels in CHANNELS.items()}
    for name, number, values in _read_channels(box):
        fields[name][number] = torch.from_numpy(values)
    return fields["Nbody"], fields["Hydro"]


def check_values(box: Box) -> None:
    """Read a whole box; raise `UserError` if it has values that are not finite numbers."""
    for _ in _read_channels(box):
        pass


def check(data_dir: Path) -> None:
    """Raise `UserError` unless both files are there, whole and of the right shape; reads no values."""
    for split in SPLITS:
        box(data_dir, split)


def _read_channels(box: Box) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield field, channel and values (n, n, n): one channel at a time, as all of them may not fit into memory."""
    with h5py.File(box.path) as file:
        for name, channels in CHANNELS.items():
            for number in range(channels):
                values = file[name][number]
                if not np.isfinite(values).all():
                    raise UserError(f"{box.path}: channel {number} of {name} has values that are not finite numbers")
                yield name, number, values
