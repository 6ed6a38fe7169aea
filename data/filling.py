"""Put a data set's files on disk: all of them or none, and never in place of data that this did not write."""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from workshop.datasets.files import ORIGIN_FILE, read_origin
from workshop.errors import UserError
from writing import synced


def fill_folder(
    folder: Path, origin: Mapping[str, Any], check: Callable[[Path], None], write: Callable[[Path], None]
) -> None:
    """Fill ``folder`` with data of this origin, unless they are there already; say on stdout what was done.

    The files are written into ``<folder>.new``, which takes its final name once they are complete, checked and on
    disk. So whenever this is interrupted, ``folder`` holds everything, or is as it was, or (for the moment between two
    renames) is not there; the next call puts things right.

    Args:
        folder: Filled and replaced as a whole.
        origin: what distinguishes these data from others. Its key ``"origin"`` is ``"downloaded"`` or ``"generated"``.
        check: Raises `UserError` if the files in the folder it is given are not complete and sound.
        write: Writes the files into the empty folder it is given.

    Raises:
        UserError: the folder holds data of the other kind, or data that were not put there by this function (these
            are never overwritten); or ``write`` raised it; or writing failed.
    """
    folder = Path(folder).resolve()
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    try:
        with _one_at_a_time(folder):
            _remove(new, old)  # left by a call that was killed
            if _is_filled(folder, origin, check):
                return
            try:
                new.mkdir(parents=True)
                write(new)
                noted = {**origin, "files": {path.name: _length_and_checksum(path) for path in sorted(new.iterdir())}}
                with synced(new / ORIGIN_FILE) as file:
                    file.write(json.dumps(noted, indent=2).encode() + b"\n")
                check(new)
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            finally:
                _remove(new, old)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from error
    print(f"{folder}: {_describe(origin)}; complete")


def _is_filled(folder: Path, origin: Mapping[str, Any], check: Callable[[Path], None]) -> bool:
    """Whether the folder holds data of this origin; `UserError` if it holds others that must not be replaced."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    damage = find_damage(folder, check)
    choice = f"move {folder} away or choose another --data_dir"
    there = read_origin(folder)
    if there is None:
        if not damage and origin["origin"] == "downloaded":
            print(f"{folder}: data of your own; complete, nothing to do")
            return True
        state = f"damaged ({damage})" if damage else "complete"
        raise UserError(f"{folder} has data of your own, {state}, which are never overwritten: {choice}")
    if there["origin"] != origin["origin"]:
        state = f", damaged ({damage})" if damage else ""
        raise UserError(
            f"{folder} has {there['origin']} data{state}, {origin['origin']} ones will not replace them: {choice}"
        )
    if damage:
        print(f"{damage}; replacing all of {folder}")
        return False
    if {key: value for key, value in there.items() if key != "files"} != origin:
        print(f"{folder}: replacing {_describe(there)} with {_describe(origin)}")
        return False
    print(f"{folder}: {_describe(there)}; complete, nothing to do")
    return True


def find_damage(folder: Path, check: Callable[[Path], None]) -> UserError | None:
    """Return what ``check`` finds wrong with the files in ``folder``, or which has changed since it was written."""
    try:
        check(folder)
        files = (read_origin(folder) or {}).get("files")
        for name, noted in files.items() if isinstance(files, dict) else ():
            if _length_and_checksum(folder / name) != noted:
                raise UserError(f"{folder / name}: damaged, changed since it was written")
    except UserError as error:
        return error
    except OSError as error:
        return UserError(f"cannot read {error.filename}: {error.strerror}")
    return None


def _length_and_checksum(path: Path) -> list[int]:
    length = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            length, checksum = length + len(chunk), zlib.crc32(chunk, checksum)
    return [length, checksum]


def _describe(origin: Mapping[str, Any]) -> str:
    details = ", ".join(f"{key} {value}" for key, value in origin.items() if isinstance(value, int))
    return f"{origin['origin']} data" + (f" ({details})" if details else "")


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Make other processes that fill the same folder wait; the lock ends with the process, however that ends."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):  # a system or file system without locks, or a folder not ours to write
            import fcntl

            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder.parent / f".{folder.name}.lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{folder}: waiting for another process that is filling it")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
