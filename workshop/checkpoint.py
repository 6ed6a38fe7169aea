"""Checkpoint files: a crash at any moment leaves a complete one, and none is trusted before it is checked."""

import os
import zipfile
from pathlib import Path
from typing import Any, Protocol

import torch

from workshop.errors import UserError


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

    Raises:
        UserError: the disk does not take it; the old files are as they were.
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
        _flush_names(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}; the checkpoints before it are as they were") from None


def load_checkpoint(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state at ``path``, else the `previous` one if ``path`` is damaged or missing.

    A damaged file is set aside, so that the next checkpoint does not push the last good one out.

    Returns:
        The state, on the CPU, or None if there is no checkpoint; and where it comes from, in words.

    Raises:
        UserError: all checkpoints that are there are damaged.
    """
    damage = ""
    for file in (path, previous(path)):
        try:
            state = _read(file)
        except FileNotFoundError:
            continue
        except Exception as error:  # torch.load raises whatever a damaged archive or pickle happens to trip over
            damage = damage or f"{file} is damaged ({str(error).strip().partition(chr(10))[0]})"
            continue
        if not damage:
            return state, str(file)
        path.replace(path.with_suffix(".damaged"))
        return state, f"{file}, as {damage},"
    if damage:
        files = f"{path.name} and {previous(path).name}"
        raise UserError(f"cannot go on: {damage}, and no earlier one is good; delete {files} to start afresh")
    return None, "nothing"


def _read(file: Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:  # what torch.save writes is one, with a checksum for each tensor
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    return torch.load(file, map_location="cpu", weights_only=True)


def _flush_names(folder: Path) -> None:
    """Make the renames in ``folder`` last beyond a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
