"""Where each data set comes from: an address to download it from, or a generator of synthetic data."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import synthetic_digits
import synthetic_images
import synthetic_nbody
from text_files import origin_of, write_text
from workshop.datasets import cifar10, image_dataset, mnist, nbody, shards, text
from workshop.datasets.files import ORIGIN_FILE, prepare_command
from workshop.errors import UserError
from workshop.jsonfile import read_json, write_json
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
    origin = {"origin": "downloaded"}
    if is_complete(module.folder(data_dir), origin, lambda: module.check(data_dir)):
        return
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    with new_data(module.folder, data_dir, origin) as root:
        try:
            fetch(root)
            module.check(root)
        except (OSError, RuntimeError, UserError) as error:
            reason, synthetic = str(error).partition("; to prepare")[0], prepare_command(name, data_dir, "--synthetic")
            raise UserError(f"cannot download {name}: {reason}; without a network run `{synthetic}`") from None


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
    if is_complete(module.folder(data_dir), {"origin": "generated", **asked}, lambda: module.check(data_dir)):
        return
    recipe = {"seed": 0, **SIZES[name], **asked}
    print(f"generating {name}, which takes up to a minute", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that rounding does not depend on the number of threads
    try:
        with new_data(module.folder, data_dir, {"origin": "generated", **recipe}) as root:
            write(root, **recipe)
    finally:
        torch.set_num_threads(threads)


def collect(data_dir: Path, source: Path | None = None) -> None:
    """Collect the text of a folder, or else of Python's standard library, unless it is there.

    Raises:
        UserError: there is no text in the folder, or other data are in its place.
    """
    source, origin = source and source.resolve(), origin_of(source and source.resolve())
    if is_complete(text.folder(data_dir), origin, lambda: text.check(data_dir)):
        return
    with new_data(text.folder, data_dir, origin) as root:
        origin |= write_text(root, source)


def pack(name: str, data_dir: Path) -> None:
    """Pack data set ``name`` into shards, unless it is packed already.

    Raises:
        UserError: the data set is missing or damaged, or shards of other data are there.
    """
    source = image_dataset(name)
    origin: dict[str, Any] = {"origin": "packed", "packed": read_json(source.folder(data_dir) / ORIGIN_FILE)}
    if is_complete(shards.folder_of(name, data_dir), origin, lambda: shards.check(name, data_dir)):
        return
    splits = {split: source.arrays(data_dir, split) for split in ("train", "val")}
    origin |= {f"{split}_samples": len(images) for split, (images, _) in splits.items()}
    with new_data(partial(shards.folder_of, name), data_dir, origin) as root:
        for split, (images, targets) in splits.items():
            for shard, path in enumerate(shards.shard_paths(name, root, split)):
                shards.write(path, shard, images, targets)


def is_complete(folder: Path, asked: dict[str, Any], check: Callable[[], object]) -> bool:
    """Return whether there are data in ``folder``; say so on stdout.

    Raises:
        UserError: ``check`` raises it, because they are damaged; or their `ORIGIN_FILE` does not say what was asked.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    check()
    there = read_json(folder / ORIGIN_FILE)
    if any(there.get(key) != value for key, value in asked.items()):
        described = ", ".join(f"{key} {value}" for key, value in there.items() if isinstance(value, int | str))
        raise UserError(
            f"{folder} has other data ({described or f'no {ORIGIN_FILE} says which'}), which are never changed: move "
            "it away, or choose another --data_dir"
        )
    print(f"{folder}: complete, nothing to do")
    return True


@contextmanager
def new_data(folder_in: Callable[[Path], Path], data_dir: Path, origin: dict[str, Any]) -> Iterator[Path]:
    """Let the ``with`` block write a data set, of which either all files will be in ``data_dir`` or none.

    Args:
        folder_in: data_dir -> the folder of the data set.
        data_dir: folder of all data sets.
        origin: what `ORIGIN_FILE` says about these data.

    Yields: A temporary data_dir, in which the folder of the data set is empty. It takes its final name at the end.

    Raises:
        UserError: files cannot be written.
    """
    folder = folder_in(data_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new_", dir=data_dir) as temporary:
            new = folder_in(Path(temporary))
            new.mkdir(parents=True)
            yield Path(temporary)
            lengths = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            write_json(new / ORIGIN_FILE, {**origin, "lengths": lengths})
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


SOURCES: dict[str, tuple[ModuleType, Callable[[Path], None], Callable[..., None]]] = {
    "mnist": (mnist, _fetch_mnist, _generate_mnist),
    "cifar10": (cifar10, _fetch_cifar10, _generate_cifar10),
    "nbody": (nbody, _fetch_nbody, _generate_nbody),
}
"""by the name of the data set: its module, and what downloads or generates it into a data_dir"""
