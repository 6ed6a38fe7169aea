"""Text for the language model: the files of a folder, one after the other, some of them kept for validation."""

import platform
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from workshop.datasets import text
from workshop.errors import UserError

LEFT_OUT = ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__")
"""folders of Python's library: its tests and tables repeat themselves, and the packages are others'"""
VALIDATION_SHARE = 0.1
"""of all bytes, at least"""


def python_sources() -> Path:
    """Return the folder of Python's standard library, which every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def origin_of(source: Path | None) -> dict[str, Any]:
    """Return what says which text it is: a folder, or else Python's standard library, of whichever version."""
    return {"origin": "python" if source is None else "files"} | ({"source": str(source)} if source else {})


def write_text(data_dir: Path, source: Path | None) -> dict[str, Any]:
    """Write the text of a folder, or else of Python's standard library, into the files of the data set.

    Which files are for validation follows from their names alone, so a text that grows keeps its division.

    Args:
        data_dir: folder of all data sets.
        source: a folder of the reader's own.

    Returns: what further describes the text: version, number of files, checksums.

    Raises:
        UserError: the folder cannot be read, or has fewer than two files of text.
    """
    found = _contents(source)
    total, chosen = sum(map(len, found.values())), 0
    for_validation: set[str] = set()
    for name in sorted(found, key=lambda name: zlib.crc32(name.encode())):
        if chosen < VALIDATION_SHARE * total and len(for_validation) < len(found) - 1:
            for_validation.add(name)
            chosen += len(found[name])
    about: dict[str, Any] = {"python": platform.python_version()} if source is None else {}
    for split in ("train", "val"):
        names = [name for name in found if (name in for_validation) == (split == "val")]
        content = b"".join(found[name] for name in names)
        text.file_of(data_dir, split).write_bytes(content)
        about |= {f"{split}_files": len(names), f"{split}_crc32": zlib.crc32(content)}
    return about


def _contents(source: Path | None) -> dict[str, bytes]:
    """Return the texts of a folder by the names of their files, sorted; files that are no text are left out."""
    folder = source or python_sources()
    if not folder.is_dir():
        raise UserError(f"--source {folder} is no folder")
    found = {}
    for file in sorted(folder.rglob("*.py" if source is None else "*")):
        name = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not file.is_file() or hidden or (source is None and not {*LEFT_OUT}.isdisjoint(name.parts)):
            continue
        content = file.read_bytes()  # an OSError becomes one line where the data set is written
        if content and _is_text(content):
            found[name.as_posix()] = content
    if len(found) < 2:
        raise UserError(
            f"{folder} has {len(found)} file(s) of text, but at least two are needed: one to train on, another to "
            "validate on"
        )
    return found


def _is_text(content: bytes) -> bool:
    """Return whether these bytes are text in UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
