"""Save and load the state of a run, never leaving a half-written file under the final name."""

import os
from pathlib import Path
from typing import Any, Protocol

import torch

from workshop.errors import UserError


class Stateful(Protocol):
    """Anything whose state can be taken out and put back: modules, optimizers, schedules, runs."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, Any]) -> object: ...  # noqa: D102


def save_checkpoint(path: Path, **parts: Stateful) -> None:
    """Write the state of all ``parts`` to ``path``: to a temporary file beside it, flushed to disk, then renamed."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path, device: torch.device, **parts: Stateful) -> None:
    """Put what `save_checkpoint` wrote back into ``parts``.

    Raises:
        UserError: the file cannot be read, or holds the state of other parts.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever a damaged archive or pickle happens to trip over
        raise UserError(f"cannot read the checkpoint {path}: {error}; delete it to start afresh") from None
    for name, part in parts.items():
        try:
            part.load_state_dict(saved[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f"{path} does not fit this run's {name}: {error}") from None
