"""Data sets of images packed into tar files (shards) for sequential reading, in the format of WebDataset.

``data_dir/shards/<name>/<split>-<shard>.tar`` has one member for each sample, ``<index>.bin``: the bytes of the image
(C, H, W), then a byte with its class. Sample i is in shard i % SHARDS, so that any first n samples are spread evenly,
and within a shard the indices rise. ``ORIGIN.json`` beside the shards says how many samples they have.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch

from workshop.datasets import image_dataset
from workshop.datasets.files import ORIGIN_FILE, prepare_command
from workshop.errors import UserError
from workshop.explain import RESOURCE_ERRNOS
from workshop.jsonfile import read_json

SHARDS = 32


def folder_of(name: str, data_dir: Path) -> Path:
    """Return the folder that the shards of data set ``name`` are in."""
    return Path(data_dir) / "shards" / name


def shard_paths(name: str, data_dir: Path, split: str) -> list[Path]:
    """Return the paths of all shards of a split, by number."""
    return [folder_of(name, data_dir) / f"{split}-{shard:03d}.tar" for shard in range(SHARDS)]


def check(name: str, data_dir: Path) -> dict[str, int]:
    """Return the number of samples in each split.

    Raises UserError: there are no shards, one is truncated, or they were packed from another version of the data set;
    names the command that packs them.
    """
    folder = folder_of(name, data_dir)
    noted = read_json(folder / ORIGIN_FILE)
    try:
        if "lengths" not in noted:
            raise UserError(f"no shards in {folder}")
        for file, length in noted["lengths"].items():
            found = (folder / file).stat().st_size if (folder / file).exists() else 0
            if found != length:
                raise UserError(f"{folder / file}: damaged, expected {length} bytes, found {found} bytes")
        source = image_dataset(name).folder(data_dir)
        if source.exists() and read_json(source / ORIGIN_FILE) != noted["packed"]:
            raise UserError(f"{folder} was packed from another version of the data in {source}")
    except UserError as error:
        make_room = f"move {folder} away and " if folder.exists() else ""
        command = prepare_command(name, data_dir, "--shards")
        raise UserError(f"{error}; to pack the shards {make_room}run `{command}`") from None
    return {split: noted[f"{split}_samples"] for split in ("train", "val")}


def write(path: Path, shard: int, images: torch.Tensor, targets: torch.Tensor) -> None:
    """Write the samples of one shard, of images (N, C, H, W) uint8 and their classes (N,), into a new file."""
    with tarfile.open(path, "w") as tar:
        for index in range(shard, len(images), SHARDS):
            content = images[index].numpy().tobytes() + bytes([int(targets[index])])
            member = tarfile.TarInfo(f"{index:08d}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def read(path: Path, indices: range) -> Iterator[tuple[int, bytes]]:
    """Yield index and content of the first samples of a shard, ``indices``; the rest is not read.

    Raises UserError: the shard is missing, or does not have these samples.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            for index in indices:
                member = tar.next()
                if member is None or member.name != f"{index:08d}.bin":
                    raise UserError(f"{path}: damaged, has no sample {index} where it should be")
                yield index, tar.extractfile(member).read()  # type: ignore[union-attr]
    except (OSError, tarfile.TarError) as error:
        if getattr(error, "errno", None) in RESOURCE_ERRNOS:
            raise  # too many open files, for example: the shard itself may be fine
        raise UserError(f"{path}: damaged ({error})") from None
