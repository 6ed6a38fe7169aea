"""Any data set of images again, as tar files to be read from front to back: the WebDataset format.

``data_dir/shards/<name>/<split>-<shard>.tar`` holds for each sample ``<index>.npy``, the image (C, H, W) uint8, and
``<index>.cls``, its class. Sample i is in shard i % SHARDS, so that any first n samples are spread evenly.
``ORIGIN.json`` beside them notes the length and the checksum of each shard.
"""

import zlib
from pathlib import Path

from workshop.datasets.files import ORIGIN_FILE, check_lengths, prepare_command, read_origin
from workshop.errors import UserError

SHARDS = 32


def folder_of(name: str, data_dir: Path) -> Path:
    """Return the folder that the shards of data set ``name`` are in."""
    return Path(data_dir) / "shards" / name


def shard_path(folder: Path, split: str, shard: int) -> Path:
    """Return the path of one shard of a split."""
    return folder / f"{split}-{shard:03d}.tar"


def shard_paths(name: str, data_dir: Path, split: str) -> list[str]:
    """Return the paths of all shards of a split, by number."""
    return [str(shard_path(folder_of(name, data_dir), split, shard)) for shard in range(SHARDS)]


def check(name: str, data_dir: Path) -> dict[str, int]:
    """Check that all shards are there and whole; return the number of samples in each split.

    Raises UserError: they are not; names the file and the command that packs them.
    """
    folder = folder_of(name, data_dir)
    try:
        check_folder(folder)
    except UserError as error:
        raise UserError(f"{error}; {_how_to_pack(folder)}") from None
    return _noted(folder)[0]


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless all shards are in this folder, of the right length."""
    check_lengths(folder, _noted(folder)[1])


def read(path: Path) -> bytes:
    """Return all of a shard; `UserError` if it is gone or damaged since `check` looked at its length."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {_how_to_pack(path.parent)}") from None
    if _noted(path.parent)[1].get(path.name) != (len(content), zlib.crc32(content)):
        raise UserError(f"{path}: damaged, not what was packed; {_how_to_pack(path.parent)}")
    return content


def _how_to_pack(folder: Path) -> str:
    return f"to pack the shards run `{prepare_command(folder.name, folder.parent.parent, '--shards')}`"


def _noted(folder: Path) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Return the number of samples in each split, and length and checksum of each shard by name."""
    origin = read_origin(folder) or {}
    try:
        samples = {split: int(origin[f"{split}_samples"]) for split in ("train", "val")}
        return samples, {name: (size, checksum) for name, (size, checksum) in origin["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"no shards in {folder}, or no {ORIGIN_FILE} that says what is in them") from None
