"""What the files of all data sets have in common: how they were prepared, and how to prepare them."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir

ORIGIN_FILE = "ORIGIN.json"
"""says how `data/prepare.py` got the files beside it: downloaded, generated or packed"""


def prepare_command(name: str, data_dir: Path, *options: str) -> str:
    """Return the command line that prepares data set ``name`` in ``data_dir``, as it is typed in the current folder."""
    script = os.path.relpath(REPOSITORY / "data" / "prepare.py")
    data_dir = Path(data_dir).resolve()
    elsewhere = [] if data_dir == default_data_dir().resolve() else ["--data_dir", str(data_dir)]
    return shlex.join(["python", script, name, *options, *elsewhere])


@contextmanager
def with_fix_hint(name: str, data_dir: Path) -> Iterator[None]:
    """Add the commands that prepare data set ``name`` to the message of a `UserError` that is raised inside."""
    try:
        yield
    except UserError as error:
        real, synthetic = (prepare_command(name, data_dir, *options) for options in ([], ["--synthetic"]))
        raise UserError(f"{error}; to prepare {name} run `{real}`, or without a network `{synthetic}`") from None


def check_lengths(folder: Path, noted: Mapping[str, Sequence[int]]) -> None:
    """Raise `UserError` unless the files in ``folder`` are as long as was noted, by name, when they came there."""
    for path, (size, *_) in ((folder / name, about) for name, about in noted.items()):
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise UserError(f"{path}: damaged, expected {size} bytes, found {found} bytes")


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Return what is noted in ``folder`` about where its data come from; None if nothing is."""
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return origin if isinstance(origin, dict) and "origin" in origin else None
