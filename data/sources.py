"""Where each data set comes from: an address to download it from, or a generator of synthetic data."""

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import synthetic_digits
import synthetic_images
import synthetic_nbody
from workshop.datasets import cifar10, image_dataset, mnist, nbody, shards
from workshop.datasets.files import ORIGIN_FILE, prepare_command
from workshop.errors import UserError
from workshop.paths import read_json, write_json
from writing import write_box, write_cifar10, write_cifar10_names, write_mnist

SIZES = {
    "mnist": {"train_samples": 60_000, "val_samples": 10_000},
    "cifar10": {"train_samples": 50_000, "val_samples": 10_000},
    "nbody": {"cells": 64},
}
"""of the synthetic data, unless asked otherwise"""

NBODY_URL = "https://portal.nersc.gov/project/dasrepo/pharring/"
NBODY_FILES = {"train": "downsamp_2048crop_train.h5", "val": "downsamp_1024crop_valid.h5"}  # 39 GB and 5 GB
TIMEOUT_SECONDS = 20
"""without a byte from a server"""


def download(name: str, data_dir: Path) -> None:
    """Download data set ``name`` into ``data_dir``, unless it is there.

    Raises:
        UserError: it cannot be downloaded, or other data are in its place.
    """
    module, fetch, _ = SOURCES[name]

    def write(data_dir_of_new: Path) -> None:
        socket.setdefaulttimeout(TIMEOUT_SECONDS)
        try:
            fetch(data_dir_of_new)
        except (OSError, RuntimeError) as error:
            synthetic = prepare_command(name, data_dir, "--synthetic")
            raise UserError(f"cannot download {name}: {error}; without a network run `{synthetic}`") from None

    fill_folder(module.folder, module.check, data_dir, {"origin": "downloaded"}, {}, write)


def generate(name: str, data_dir: Path, **asked: int) -> None:
    """Generate synthetic data in the files of data set ``name``; the same seed and sizes give the same bytes.

    Args:
        name: of the data set.
        data_dir: folder of all data sets.
        asked: ``seed`` and sizes, as in `SIZES`; what is missing is as in the data that are there, else the default.

    Raises:
        UserError: other data are in its place.
    """
    module, _, write = SOURCES[name]
    recipe = {"seed": 0, **SIZES[name], **asked}

    def write_on_one_thread(data_dir_of_new: Path) -> None:
        print(f"generating {name}, which takes up to a minute", flush=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that rounding does not depend on the number of threads
        try:
            write(data_dir_of_new, **recipe)
        finally:
            torch.set_num_threads(threads)

    origin = {"origin": "generated"}
    fill_folder(module.folder, module.check, data_dir, origin | asked, recipe, write_on_one_thread)


def pack(name: str, data_dir: Path) -> None:
    """Pack data set ``name`` into shards, unless it is packed already.

    Raises:
        UserError: the data set is missing or damaged, or shards of other data are there.
    """
    source = image_dataset(name)
    splits = {split: source.arrays(data_dir, split) for split in ("train", "val")}
    origin = {"origin": "packed", "packed": read_json(source.folder(data_dir) / ORIGIN_FILE)}
    samples = {f"{split}_samples": len(images) for split, (images, _) in splits.items()}

    def write(data_dir_of_new: Path) -> None:
        for split, (images, targets) in splits.items():
            for shard, path in enumerate(shards.shard_paths(name, data_dir_of_new, split)):
                shards.write(path, shard, images, targets)

    fill_folder(partial(shards.folder_of, name), partial(shards.check, name), data_dir, origin, samples, write)


def fill_folder(
    folder_in: Callable[[Path], Path],
    check: Callable[[Path], object],
    data_dir: Path,
    asked: Mapping[str, Any],
    more: Mapping[str, Any],
    write: Callable[[Path], None],
) -> None:
    """Write the files of a data set, all of them or none, unless they are there; say on stdout what was done.

    The files are written into a temporary folder beside, which takes its final name when they are complete.

    Args:
        folder_in: data_dir -> the folder of the data set.
        check: raises `UserError` unless the data set in the data_dir that it gets is complete and sound.
        data_dir: folder of all data sets.
        asked: what `ORIGIN_FILE` must say if there are data already.
        more: what it also says about the new files.
        write: writes the files into the data_dir that it gets, where their folder exists.

    Raises:
        UserError: other data are there, which are never changed; or they are damaged; or files cannot be written.
    """
    folder = folder_in(data_dir)
    try:
        if folder.exists() and any(folder.iterdir()):
            check(data_dir)
            there = read_json(folder / ORIGIN_FILE)
            if any(there.get(key) != value for key, value in asked.items()):
                described = ", ".join(f"{key} {value}" for key, value in there.items() if isinstance(value, int | str))
                raise UserError(
                    f"{folder} has other data ({described or f'no {ORIGIN_FILE} says which'}), which are never "
                    "changed: move it away, or choose another --data_dir"
                )
            print(f"{folder}: complete, nothing to do")
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new_", dir=data_dir) as temporary:
            new = folder_in(Path(temporary))
            new.mkdir(parents=True)
            write(Path(temporary))
            lengths = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            write_json(new / ORIGIN_FILE, {**more, **asked, "lengths": lengths})
            check(Path(temporary))
            os.replace(new, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from None
    print(f"{folder}: complete")


def _fetch_mnist(data_dir: Path) -> None:
    from torchvision.datasets import MNIST  # here: it takes seconds to import

    MNIST(data_dir, download=True)
    for archive in mnist.folder(data_dir).glob("*.gz"):
        archive.unlink()


def _generate_mnist(data_dir: Path, seed: int, train_samples: int, val_samples: int) -> None:
    for split, samples, seed_of_split in (("train", train_samples, 2 * seed), ("val", val_samples, 2 * seed + 1)):
        write_mnist(mnist.folder(data_dir), split, *synthetic_digits.generate_digits(samples, seed_of_split))


def _fetch_cifar10(data_dir: Path) -> None:
    from torchvision.datasets import CIFAR10

    CIFAR10(data_dir, download=True)


def _generate_cifar10(data_dir: Path, seed: int, train_samples: int, val_samples: int) -> None:
    folder = cifar10.folder(data_dir)
    for split, samples, seed_of_split in (("train", train_samples, 2 * seed), ("val", val_samples, 2 * seed + 1)):
        write_cifar10(folder, split, *synthetic_images.generate_images(samples, seed_of_split))
    write_cifar10_names(folder, synthetic_images.NAMES)


def _fetch_nbody(data_dir: Path) -> None:
    from torchvision.datasets.utils import download_url

    for split, name in NBODY_FILES.items():  # they come without a checksum
        path = nbody.path_of(nbody.folder(data_dir), split)
        download_url(NBODY_URL + name, path.parent, path.name)


def _generate_nbody(data_dir: Path, seed: int, cells: int) -> None:
    physics = synthetic_nbody.Physics()
    for split, seed_of_split in (("train", 2 * seed), ("val", 2 * seed + 1)):
        about = {"periodic": True, "seed": seed_of_split, "redshift": 3.0, "box_size_mpc_h": cells * physics.cell}
        about |= {"velocity_unit": "100 km/s"} | {f"physics_{name}": value for name, value in vars(physics).items()}
        box = synthetic_nbody.generate_box(cells, seed_of_split, physics)
        write_box(nbody.path_of(nbody.folder(data_dir), split), *box, about)


SOURCES = {
    "mnist": (mnist, _fetch_mnist, _generate_mnist),
    "cifar10": (cifar10, _fetch_cifar10, _generate_cifar10),
    "nbody": (nbody, _fetch_nbody, _generate_nbody),
}
"""by the name of the data set: its module, and what downloads or generates it into a data_dir"""
