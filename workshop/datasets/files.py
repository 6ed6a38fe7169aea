"""What the files of all data sets have in common: how they are prepared."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir

ORIGIN_FILE = "ORIGIN.json"
"""file that records how `data/prepare.py` got the files beside it: downloaded, generated (seed, sizes) or packed"""


def prepare_command(name: str, data_dir: Path, *options: str) -> str:
    """Return the command line that prepares data set ``name`` in ``data_dir``, as it is typed in the current folder."""
    script = os.path.relpath(REPOSITORY / "data" / "prepare.py")
    data_dir = Path(data_dir).resolve()
    elsewhere = [] if data_dir == default_data_dir().resolve() else ["--data_dir", str(data_dir)]
    return shlex.join(["python", script, name, *options, *elsewhere])


@contextmanager
def with_fix_hint(name: str, data_dir: Path, folder: Path) -> Iterator[None]:
    """Turn errors in reading the files of ``folder`` into one line, with the commands that fix them.

    Raises UserError: a `UserError` or an `OSError`, such as that of a missing file, is raised inside.
    """
    try:
        yield
    except (UserError, OSError) as error:
        problem = f"cannot read {error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        real, synthetic = (prepare_command(name, data_dir, *options) for options in ([], ["--synthetic"]))
        make_room = f"move {folder} away and " if folder.exists() else ""
        raise UserError(
            f"{problem}; to prepare {name} {make_room}run `{real}`, or without a network `{synthetic}`"
        ) from None
