"""Where each data set comes from: an address to download it from, or a generator of synthetic data."""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import synthetic_digits
import synthetic_images
import synthetic_nbody
from downloading import DownloadError, download_file
from filling import fill_folder
from generating import complete_recipe
from workshop.datasets import cifar10, image_dataset, mnist, nbody, shards
from workshop.datasets.files import prepare_command
from workshop.errors import UserError
from workshop.hardware import free_bytes
from writing import (
    synced,
    write_box,
    write_cifar10,
    write_cifar10_names,
    write_mnist,
    write_shards,
)

Recipe = dict[str, int]

NBODY_URL = "https://portal.nersc.gov/project/dasrepo/pharring/"
NBODY_FILES = {"train": "downsamp_2048crop_train.h5", "val": "downsamp_1024crop_valid.h5"}  # 39 GB and 5 GB
NBODY_BYTES_PER_CELL = 60  # about, while a box is generated


@dataclass(frozen=True, kw_only=True)
class Source:
    """How the files of one data set are downloaded or generated."""

    folder: Callable[[Path], Path]
    """data_dir -> the folder they are in"""
    check_folder: Callable[[Path], None]
    """raises `UserError` unless the files in a folder are whole and sound"""
    fetch: Callable[[Path], Mapping[str, Any]]
    """downloads them into a folder"""
    real: Callable[[], Mapping[str, Any]]
    """returns what distinguishes the real data from others"""
    generate: Callable[[Path, Recipe], None]
    """generates synthetic data into a folder"""
    defaults: Recipe
    """what to generate unless asked otherwise: the seed, and the sizes"""
    version: int
    """of the generator"""


def download(name: str, data_dir: Path) -> None:
    """Download data set ``name`` into ``data_dir``, unless it is there.

    Raises:
        UserError: it cannot be downloaded, or other data are in its place (see `fill_folder`).
    """
    source = SOURCES[name]
    try:
        fill_folder(
            source.folder(data_dir), {"origin": "downloaded", **source.real()}, source.check_folder, source.fetch
        )
    except DownloadError as error:
        synthetic = prepare_command(name, data_dir, "--synthetic")
        raise UserError(f"{error}; without a network `{synthetic}` generates synthetic data") from None


def generate(name: str, data_dir: Path, **asked: int | None) -> None:
    """Generate synthetic data in the files of data set ``name``; the same arguments give the same bytes.

    Args:
        name: of the data set.
        data_dir: root folder of the data sets.
        asked: seed and sizes, by the names of the data set's recipe. What is missing or None is as in the data
            that are there already, else the default.

    Raises:
        UserError: a size below one, one that memory cannot hold, or a seed outside 0..2^32-1 asked for; or other data
            are in its place (see `fill_folder`).
    """
    source = SOURCES[name]
    folder = source.folder(data_dir)
    recipe = complete_recipe(folder, source.defaults, asked)
    if name == "nbody":
        _require_memory(recipe["cells"])
    origin = {"origin": "generated", **recipe, "version": source.version}
    fill_folder(folder, origin, source.check_folder, lambda new: source.generate(new, recipe))


def pack(name: str, data_dir: Path) -> None:
    """Pack data set ``name`` into shards, unless these very samples are packed there already.

    Raises:
        UserError: the data set is missing or damaged, or the shards cannot be written.
    """
    source = image_dataset(name)
    source.check(data_dir)
    splits = {split: source.arrays(data_dir, split) for split in ("train", "val")}
    origin = {"origin": "packed", "shards": shards.SHARDS}
    for split, (images, targets) in splits.items():
        origin[f"{split}_samples"] = len(images)
        origin[f"{split}_checksum"] = zlib.crc32(targets.numpy(), zlib.crc32(images.numpy()))

    def write(folder: Path) -> None:
        for split, (images, targets) in splits.items():
            write_shards(folder, split, images, targets)

    fill_folder(shards.folder_of(name, data_dir), origin, shards.check_folder, write)


def _fetch_mnist(folder: Path) -> None:
    from torchvision.datasets import MNIST

    for name, md5 in MNIST.resources:
        packed = folder / name
        download_file([mirror + name for mirror in MNIST.mirrors], packed, md5)
        with gzip.open(packed) as source, synced(packed.with_suffix("")) as target:
            shutil.copyfileobj(source, target)
        packed.unlink()


def _real_mnist() -> dict[str, Any]:
    from torchvision.datasets import MNIST

    return {"md5": dict(MNIST.resources)}


def _generate_mnist(folder: Path, recipe: Recipe) -> None:
    for number, split in enumerate(("train", "val")):
        samples = synthetic_digits.generate_digits(recipe[f"{split}_samples"], 2 * recipe["seed"] + number)
        write_mnist(folder, split, *samples)


def _fetch_cifar10(folder: Path) -> None:
    from torchvision.datasets import CIFAR10

    packed = folder / CIFAR10.filename
    download_file([CIFAR10.url], packed, CIFAR10.tgz_md5)
    # Only the files that are wanted leave the archive, to where we say: no path in it is trusted.
    wanted = {f"{cifar10.FOLDER}/{name}": folder / name for name in cifar10.ALL_FILES}
    with tarfile.open(packed) as archive:
        for member in archive:
            if member.isfile() and member.name in wanted:
                with synced(wanted[member.name]) as target:
                    shutil.copyfileobj(archive.extractfile(member), target)
    packed.unlink()


def _real_cifar10() -> dict[str, Any]:
    from torchvision.datasets import CIFAR10

    return {"md5": CIFAR10.tgz_md5}


def _generate_cifar10(folder: Path, recipe: Recipe) -> None:
    for number, split in enumerate(("train", "val")):
        samples = synthetic_images.generate_images(recipe[f"{split}_samples"], 2 * recipe["seed"] + number)
        write_cifar10(folder, split, *samples)
    write_cifar10_names(folder, synthetic_images.NAMES)


def _fetch_nbody(folder: Path) -> None:
    for split, name in NBODY_FILES.items():  # they come without a checksum
        download_file([NBODY_URL + name], nbody.path_of(folder, split), md5=None)


def _require_memory(cells: int) -> None:
    needed, free = NBODY_BYTES_PER_CELL * cells**3, free_bytes(torch.device("cpu"))
    if needed > free:
        raise UserError(f"--cells {cells} needs {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free")


def _generate_nbody(folder: Path, recipe: Recipe) -> None:
    cells = recipe["cells"]
    physics = synthetic_nbody.Physics()
    for number, split in enumerate(("train", "val")):
        seed = 2 * recipe["seed"] + number
        about = {"periodic": True, "seed": seed, "redshift": 3.0, "box_size_mpc_h": cells * physics.cell}
        about |= {"velocity_unit": "100 km/s"} | {f"physics_{name}": value for name, value in vars(physics).items()}
        write_box(nbody.path_of(folder, split), *synthetic_nbody.generate_box(cells, seed, physics), about)


SOURCES = {
    "mnist": Source(
        folder=mnist.folder,
        check_folder=mnist.check_folder,
        fetch=_fetch_mnist,
        real=_real_mnist,
        generate=_generate_mnist,
        defaults={"seed": 0, "train_samples": 60_000, "val_samples": 10_000},
        version=synthetic_digits.VERSION,
    ),
    "cifar10": Source(
        folder=cifar10.folder,
        check_folder=cifar10.check_folder,
        fetch=_fetch_cifar10,
        real=_real_cifar10,
        generate=_generate_cifar10,
        defaults={"seed": 0, "train_samples": 50_000, "val_samples": 10_000},
        version=synthetic_images.VERSION,
    ),
    "nbody": Source(
        folder=nbody.folder,
        check_folder=nbody.check_folder,
        fetch=_fetch_nbody,
        real=lambda: {"files": NBODY_FILES},
        generate=_generate_nbody,
        defaults={"seed": 0, "cells": 64},
        version=synthetic_nbody.VERSION,
    ),
}
"""by the name of the data set"""
