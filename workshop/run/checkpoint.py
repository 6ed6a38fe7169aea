"""Checkpoints: the file, which is complete at any moment; whether it fits a run; the states of random generators."""

import os
import random
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from workshop.config import TrainConfig
from workshop.datasets import IMAGES
from workshop.datasets.files import read_origin
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError

ONLY_WITHIN_AN_EPOCH = {"world_size", "seed", "loader", "steps_per_epoch"}
"""what may change from one epoch to the next, but not within one: the rest of it would be other samples"""
MAY_BE_MISSING = {"precision", "data", "train_samples", "steps_per_epoch"}
"""what is not compared where one of two runs has not noted it: not all lessons, and no early checkpoints, have it"""


class Stateful(Protocol):
    """Anything whose state can be taken out and put back: modules, optimizers, schedules, gradient scalers."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, Any]) -> object: ...  # noqa: D102


def previous(path: Path) -> Path:
    """Return where the checkpoint before the one at ``path`` is kept."""
    return path.with_suffix(f".previous{path.suffix}")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` and keep the checkpoint that was there as the `previous` one.

    Under at least one of the two names there is a complete file at every moment: the new one is written under a third
    name and flushed to disk before the old one makes way for it.

    Raises UserError: the disk does not take it; the old files are as they were.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(previous(path))
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # else the renames might not last beyond a power cut
        os.close(folder)
    except (OSError, RuntimeError) as error:  # in words of its own torch.save says that its file could not be written
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}; the checkpoints before it are as they were") from None


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint file that has been read from end to end; all ranks are sent this, and read the file themselves."""

    file: Path
    source: str
    """the file in words, with the reason if it is not the latest one"""
    checksum: int
    """of its contents, see `checksum_of`"""


def find_checkpoint(path: Path) -> GoodCheckpoint | None:
    """Return the checkpoint at ``path``, else the `previous` one if ``path`` is damaged or missing; None without any.

    All checksums in the file are verified, and the file is loaded once. A damaged file is set aside, so that the next
    checkpoint does not push the last good one out.

    Raises UserError: all checkpoints that are there are damaged, or one cannot be read.
    """
    damage = ""
    for file in (path, previous(path)):
        try:
            with zipfile.ZipFile(file) as archive:  # what torch.save writes is one, with a checksum for each tensor
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            checksum = checksum_of(file)
            _load(file)
        except FileNotFoundError:
            continue
        except Exception as error:  # torch.load raises whatever a damaged archive or pickle happens to trip over
            reason = _reason(error)
            if isinstance(error, OSError | MemoryError) or "memory" in reason:
                raise UserError(f"cannot read {file}, which may be whole: {reason}") from None
            damage = damage or f"{file} is damaged ({reason})"
            continue
        if not damage:
            return GoodCheckpoint(file, str(file), checksum)
        path.replace(path.with_suffix(".damaged"))
        return GoodCheckpoint(file, f"{file}, as {damage},", checksum)
    if damage:
        files = f"{path.name} and {previous(path).name}"
        raise UserError(f"cannot go on: {damage}, and no earlier one is good; delete {files} to start afresh")
    return None


def read_checkpoint(good: GoodCheckpoint) -> dict[str, Any]:
    """Return the state in a file that rank 0 has found good; any rank may call this.

    The tensors are on the CPU, in pages of the file that the operating system reads when they are used and may drop
    at any time. So they need almost no memory until they are copied; and they must be copied, not kept, because the
    file is removed when later checkpoints have been written.

    Raises UserError: this rank does not see the file, or sees another one, or cannot read it.
    """
    where = f"{good.file} on {os.uname().nodename}"
    shared = "the run folder must be on storage that all nodes share; give another --run_dir"
    try:
        if checksum_of(good.file) != good.checksum:
            raise UserError(f"{where} is not the file that rank 0 has found good: {shared}")
        return _load(good.file)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{where} is not there, but rank 0 has found it: {shared}") from None
    except Exception as error:  # torch.load raises whatever it happens to trip over
        raise UserError(f"cannot read {where}, which rank 0 has found good: {_reason(error)}") from None


def checksum_of(file: Path) -> int:
    """Return a checksum of what is in a checkpoint file, from the checksums of its parts, without reading those."""
    with zipfile.ZipFile(file) as archive:
        return zlib.crc32(repr([(part.filename, part.CRC) for part in archive.infolist()]).encode())


def _load(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:  # some network file systems do not have files mapped into memory
        if "unable to mmap" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or "no memory left"


def identity(config: TrainConfig, ranks: Ranks, parts: Mapping[str, object]) -> dict[str, Any]:
    """Return what two runs must have in common for one to go on where the other stopped.

    Number and sizes of the steps are among it, because a schedule may count steps.
    """
    shards = f" of {config.num_workers} worker(s)" if config.loader == "shards" else ""  # each reads shards of its own
    kinds = {name: type(part).__name__ for name, part in parts.items()}
    kinds |= {"precision": config.precision} if hasattr(config, "precision") else {}
    module = IMAGES.get(config.dataset)  # volumes lie in a folder of their name
    origin = read_origin(module.folder(config.data_dir) if module else config.data_dir / config.dataset)
    return kinds | {
        "data": "of unknown origin" if origin is None else ", ".join(f"{key} {origin[key]}" for key in origin),
        "model": config.model,
        "dataset": config.dataset,
        "limit_train": config.limit_train,
        "global_batch_size": config.batch_size * ranks.world_size,
        "world_size": ranks.world_size,
        "seed": config.seed,
        "loader": config.loader + shards,
    }


def refuse_misfit(path: Path, theirs: dict[str, Any], mine: dict[str, Any], in_epoch: int | None) -> None:
    """Raise `UserError` if the `identity` of the checkpoint's run, or another part of what it is, differs from mine.

    ``in_epoch`` is the epoch that was under way, None if it was saved between two.
    """
    fields = [field for field in theirs | mine if theirs.get(field) != mine.get(field)]
    fields = [field for field in fields if field in theirs.keys() & mine.keys() or field not in MAY_BE_MISSING]
    if in_epoch is None:
        fields = [field for field in fields if field not in ONLY_WITHIN_AN_EPOCH]
    if fields:
        what = "; ".join(f"{field} is {theirs.get(field)} there and {mine.get(field)} here" for field in fields)
        why = f", and it was saved in the middle of epoch {in_epoch}" if ONLY_WITHIN_AN_EPOCH & set(fields) else ""
        raise UserError(f"{path} is of another run: {what}{why}; give the same, or another --run_dir")


def position(epoch: int, step: int) -> str:
    """Say where a run is that has taken ``step`` steps of ``epoch``, counted from 1."""
    return f"after step {step} of epoch {epoch}" if step else f"after epoch {epoch - 1}"


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's generators, on the CPU and on ``device``, and of Python's and numpy's.

    They consist of what `torch.load` reads with ``weights_only=True``.
    """
    name, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on drawing from where `random_state` was taken; a GPU that had no part in it keeps its own state."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
