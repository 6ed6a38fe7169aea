"""Bringing a data set's files to disk: there whole or not at all, and never over data that are not ours."""

import http.client
import json
import os
import shlex
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torchvision.datasets.utils import check_integrity
from tqdm import tqdm

from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir

ORIGIN_FILE = "ORIGIN.json"
TIMEOUT_SECONDS = 20  # without a sign of life from a mirror


def prepare_command(name: str, data_dir: Path, *options: str) -> str:
    """Return the command line, to be typed in the present folder, that brings data set ``name`` into ``data_dir``."""
    script = os.path.relpath(REPOSITORY / "data" / "prepare.py")
    data_dir = Path(data_dir).resolve()
    elsewhere = [] if data_dir == default_data_dir().resolve() else ["--data_dir", str(data_dir)]
    return shlex.join(["python", script, name, *options, *elsewhere])


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Return what `fill_folder` noted in ``folder`` about where its data come from; None if it did not fill it."""
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return origin if isinstance(origin, dict) and "origin" in origin else None


def fill_folder(
    folder: Path, origin: Mapping[str, Any], check: Callable[[Path], None], write: Callable[[Path], None]
) -> None:
    """Have ``folder`` hold data of this origin, unless they are there already; say on stdout what was done.

    The files are written into ``<folder>.new``, which takes its final name once they are complete, checked and on
    disk. So whenever this is interrupted, ``folder`` holds everything, or is as it was, or (for the moment between two
    renames) is not there; the next call puts things right.

    Args:
        folder: Filled and replaced as a whole.
        origin: What tells these data from others. Its key ``"origin"`` is ``"downloaded"`` or ``"generated"``.
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
                check(new)
                with synced(new / ORIGIN_FILE) as file:
                    file.write(json.dumps(origin, indent=2).encode() + b"\n")
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
    damage = None
    try:
        check(folder)
    except UserError as error:
        damage = error
    choice = f"move {folder} away or choose another --data_dir"
    there = read_origin(folder)
    if there is None:
        if not damage and origin["origin"] == "downloaded":
            print(f"{folder}: data of your own; complete, nothing to do")
            return True
        state = f"damaged ({damage})" if damage else "complete"
        raise UserError(f"{folder} has data of your own, {state}, which are never overwritten: {choice}")
    if there["origin"] != origin["origin"]:
        raise UserError(f"{folder} has {there['origin']} data, {origin['origin']} ones will not replace them: {choice}")
    if damage:
        print(f"{damage}; replacing all of {folder}")
        return False
    if there != origin:
        print(f"{folder}: replacing {_describe(there)} with {_describe(origin)}")
        return False
    print(f"{folder}: {_describe(there)}; complete, nothing to do")
    return True


def _describe(origin: Mapping[str, Any]) -> str:
    details = ", ".join(f"{key} {value}" for key, value in origin.items() if isinstance(value, int))
    return f"{origin['origin']} data" + (f" ({details})" if details else "")


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Make other processes that fill the same folder wait; the lock goes with the process, however it ends."""
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


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it is on disk, not only on its way there, when the ``with`` block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def download(urls: Sequence[str], path: Path, md5: str | None) -> None:
    """Download ``path`` from the first of ``urls`` that delivers a file with this MD5 checksum; None: any file.

    Raises:
        UserError: none of them did; names each and why.
    """
    failures = []
    for url in urls:
        part = path.with_name(path.name + ".part")
        try:
            _fetch(url, part)
            if check_integrity(part, md5):
                os.replace(part, path)
                return
            failures.append(f"{url} (wrong checksum, {part.stat().st_size} bytes)")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url} ({getattr(error, 'reason', None) or error})")
    raise UserError(f"cannot download {path.name}; tried {', '.join(failures)}")


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, synced(path) as file:
        size = int(response.headers.get("Content-Length") or 0) or None
        with tqdm(total=size, desc=path.stem, unit="B", unit_scale=True, disable=None, leave=False) as progress:
            while chunk := response.read(1 << 16):
                file.write(chunk)
                progress.update(len(chunk))
