"""N-body boxes: from the dark matter of a simulation to the gas in it, a map from volumes to volumes.

Each split is one HDF5 file, ``data_dir/nbody/train.h5`` and ``val.h5``, with two fields of float32: ``Nbody``
(4, n, n, n), density contrast and three components of the velocity, and ``Hydro`` (5, n, n, n), the same of the gas and
its temperature contrast. Channel 1 is the velocity along the first axis of the volume, and so on. If the file has the
attribute ``periodic`` and it is true, the box continues at its opposite side. The names of the fields are those of the
files that NERSC's tutorial "Deep Learning at Scale" reads.
"""

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


def check(data_dir: Path) -> None:
    """Check that both files are there, whole and of the right shape; takes a few milliseconds, and reads no values.

    Raises UserError: they are not; names the file, what is wrong, and the commands that prepare the data.
    """
    with files.with_fix_hint(NAME, data_dir):
        for split in SPLITS:
            _describe(path_of(folder(data_dir), split))


def box(data_dir: Path, split: str) -> Box:
    """Return what the file of a split ("train" or "val") holds, without reading its values; raise as `check`."""
    check(data_dir)
    return _describe(path_of(folder(data_dir), split))


def arrays(data_dir: Path, split: str, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the whole box of a split ("train" or "val") onto ``device``, by default the CPU, channel by channel.

    Returns: Nbody (4, n, n, n) and Hydro (5, n, n, n), both float32.

    Raises UserError: as `check`, or there are values that are not finite numbers.
    """
    return read_arrays(box(data_dir, split).path, device)


def read_arrays(path: Path, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a whole box, whose file `box` has checked; see `arrays`."""
    with h5py.File(path) as file:
        return _read(file, "Nbody", device), _read(file, "Hydro", device)


def check_values(path: Path) -> None:
    """Read all of a file, channel by channel; raise `UserError` if there are values that are not finite numbers."""
    with h5py.File(path) as file:
        for field, channels in CHANNELS.items():
            bad = sum(int(np.count_nonzero(~np.isfinite(file[field][channel]))) for channel in range(channels))
            if bad:
                raise UserError(f"{path}: {bad} of the {file[field].size} values of {field} are not finite numbers")


def folder(data_dir: Path) -> Path:
    """Return the folder that the files are in."""
    return Path(data_dir) / NAME


def path_of(folder: Path, split: str) -> Path:
    """Return the path of the file of a split."""
    return folder / f"{split}.h5"


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless both files are in this folder, with all they should hold and nothing but numbers."""
    for split in SPLITS:
        check_values(_describe(path_of(folder, split)).path)


def _describe(path: Path) -> Box:
    """Return what the file at ``path`` holds; `UserError` unless it is of the documented layout."""
    if not path.is_file():
        raise UserError(f"{path.parent}: has no {path.name}")
    try:
        with h5py.File(path) as file:
            edges = {field: _edge(file, field, channels, path) for field, channels in CHANNELS.items()}
            periodic = bool(file.attrs.get("periodic", False))
    except OSError as error:
        raise UserError(f"{path}: not a whole HDF5 file ({error})") from None
    if edges["Nbody"] != edges["Hydro"]:
        raise UserError(f"{path}: Nbody has {edges['Nbody']} cells along an edge, but Hydro has {edges['Hydro']}")
    return Box(path, edges["Nbody"], periodic)


def _edge(file: h5py.File, field: str, channels: int, path: Path) -> int:
    """Return how many cells a field has along each edge."""
    if not isinstance(file.get(field), h5py.Dataset):
        raise UserError(f"{path}: has no field {field}, only {', '.join(sorted(file)) or 'nothing'}")
    shape, dtype = file[field].shape, file[field].dtype
    if len(shape) != 4 or shape != (channels, *shape[-1:] * 3) or not shape[-1]:
        raise UserError(f"{path}: {field} is of shape {shape}, expected ({channels}, n, n, n)")
    if dtype.kind != "f" or dtype.itemsize != 4:
        raise UserError(f"{path}: {field} holds {dtype}, expected float32")
    return shape[-1]


def _read(file: h5py.File, field: str, device: torch.device | None) -> torch.Tensor:
    values, bad = torch.empty(file[field].shape, device=device), 0
    read = np.empty(values.shape[1:], np.float32)
    # one by one, so that other threads, such as the failure detector's, can run in between
    for channel in range(len(values)):
        file[field].read_direct(read, np.s_[channel])
        bad += np.count_nonzero(~np.isfinite(read))
        values[channel] = torch.from_numpy(read)
    if bad:
        raise UserError(f"{file.filename}: {bad} of the {values.numel()} values of {field} are not finite numbers")
    return values
