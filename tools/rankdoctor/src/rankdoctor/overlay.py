"""Let a script write, without changing a file of the user's: what it writes goes into a folder of the doctor's.

A file that the script would write at /home/me/model.pt is written at SCRATCH/files/home/me/model.pt, and read from
there. A file that it would remove gets a mark below SCRATCH/removed instead. This holds for files that Python's own
functions open, and for some libraries that open files in C, but not for other programs: see README.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import settings
from .trail import note, trail, user_line

EXEMPT = ("/dev/", "/proc/", "/sys/")
READERS = ["stat", "lstat", "access", "readlink", "statvfs", "pathconf", "getxattr", "listxattr"]
CHANGERS = ["chmod", "lchmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr", "chflags"]
own: dict[str, Callable[..., Any]] = {}
"""the functions of `os` and `shutil` as they were"""


class Overlay:
    """Finds where a path leads."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.files = f"{scratch}/files"
        self.removed = f"{scratch}/removed"
        self.noted: set[str] = set()

    def original(self, path: Any) -> str | None:
        """Return the absolute path that the script means; None if it is not redirected (a descriptor, a device)."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        full = os.path.abspath(os.fsdecode(path))
        if full.startswith(self.files + "/"):
            return full[len(self.files) :]
        return None if full.startswith((self.scratch, *EXEMPT)) else full

    def is_removed(self, full: str) -> bool:
        """Return whether the script has removed this file of the user's, or a folder that it lies in."""
        if not _exists(self.removed):
            return False
        while full != "/":
            if _exists(f"{self.removed}{full}.removed"):
                return True
            full = os.path.dirname(full)
        return False

    def is_users(self, full: str) -> bool:
        """Return whether there is a file or folder of the user's that the script has not removed."""
        return _exists(full) and not self.is_removed(full)

    def to_read(self, path: Any) -> Any:
        """Return where a reader finds the file."""
        full = self.original(path)
        if full is None:
            return path
        if _exists(self.files + full) or self.is_removed(full):
            return self.files + full
        return full if own["getcwd"]().startswith(self.files) else path  # in a folder that the script has made

    def to_write(self, path: Any, keep: bool = True) -> Any:
        """Return where a writer writes the file; with ``keep`` its present content is copied there first."""
        full = self.original(path)
        if full is None:
            return path
        target = self.files + full
        if not _exists(target):
            if self.is_users(os.path.dirname(full)):
                _make_folders(os.path.dirname(target))
            if self.is_users(full) and os.path.isdir(full):
                own["copytree"](full, target, symlinks=True) if keep else _make_folders(target)
            elif keep and self.is_users(full):
                own["copy2"](full, target)
        return target

    def unmark(self, path: Any) -> None:
        """Note that a file exists again."""
        mark = f"{self.removed}{self.original(path)}.removed"
        if _exists(mark):
            own["unlink"](mark)

    def mark_removed(self, path: Any) -> None:
        """Note that the script has removed a file; hide the user's."""
        full = self.original(path)
        if full is not None and self.is_users(full):
            _make_folders(f"{self.removed}{os.path.dirname(full)}")
            own["close"](own["open"](f"{self.removed}{full}.removed", os.O_CREAT | os.O_WRONLY))

    def note_write(self, path: Any, how: str) -> None:
        """Log, once for each file, that the script wanted to write it."""
        full = self.original(path)
        if full is not None and full not in self.noted:
            self.noted.add(full)
            note("write", file=full, how=how, at=user_line())


def _exists(path: str) -> bool:
    try:
        own["lstat"](path)
    except (OSError, ValueError):
        return False
    return True


def _make_folders(path: str) -> None:
    if not _exists(path):
        _make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):  # made by another rank
            own["mkdir"](path)


class Entries:
    """What `os.scandir` returns, for a folder of which a part is in the scratch folder."""

    def __init__(self, found: list[os.DirEntry]) -> None:
        self.found = iter(found)

    def __iter__(self) -> Iterator[os.DirEntry]:
        return self.found

    def __next__(self) -> os.DirEntry:
        return next(self.found)

    def __enter__(self) -> "Entries":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing: all entries have been read."""


def _writes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def install() -> None:
    """Redirect the writing functions of this process."""
    config = settings.load()
    own.update({name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))})
    own.update({name: getattr(shutil, name) for name in ("copytree", "copy2", "rmtree")})
    if config.redirect:
        overlay = Overlay(config.scratch)
        _redirect_simple(overlay)
        _redirect_open(overlay)
        _redirect_folders(overlay)
        _redirect_removal(overlay)
        sys.addaudithook(functools.partial(_refuse, overlay))


def _replace(module: Any, name: str, new: Callable[..., Any]) -> None:
    setattr(module, name, functools.wraps(own[name])(new))


def _redirect_simple(overlay: Overlay) -> None:
    def through(name: str, find: Callable[[Any], Any]) -> None:
        function = own[name]

        def redirected(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return function(path if kwargs.get("dir_fd") is not None else find(path), *args, **kwargs)

        _replace(os, name, redirected)

    for name in READERS:
        if name in own:
            through(name, overlay.to_read)
    for name in CHANGERS:
        if name in own:
            through(name, overlay.to_write)

    def chdir(path: Any) -> None:
        full = overlay.original(path)
        own["chdir"](full if full is not None and overlay.is_users(full) else overlay.to_read(path))

    def getcwd() -> str:
        folder = own["getcwd"]()
        return folder.removeprefix(overlay.files) or "/"

    _replace(os, "chdir", chdir)
    _replace(os, "getcwd", getcwd)


def _redirect_open(overlay: Overlay) -> None:
    own_open = io.open

    @functools.wraps(own_open)
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not _writes(mode) or overlay.original(file) is None:
            return own_open(overlay.to_read(file), mode, *args, **kwargs)
        if "x" in mode and overlay.is_users(str(overlay.original(file))):
            return own_open(file, mode, *args, **kwargs)  # raises FileExistsError
        overlay.note_write(file, mode)
        target = overlay.to_write(file, keep="a" in mode or "r" in mode)
        opened = own_open(target, mode, *args, **kwargs)
        overlay.unmark(file)
        return opened

    def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return own["open"](overlay.to_read(path), flags, mode, dir_fd=dir_fd)
        if flags & os.O_EXCL and overlay.is_users(str(overlay.original(path))):
            return own["open"](path, flags, mode)  # raises FileExistsError
        overlay.note_write(path, "w")
        descriptor = own["open"](overlay.to_write(path, keep=not flags & os.O_TRUNC), flags, mode)
        overlay.unmark(path)
        return descriptor

    builtins.open = io.open = open_file
    _replace(os, "open", open_descriptor)


def _redirect_folders(overlay: Overlay) -> None:
    is_reversed = bool(os.environ.get("RANKDOCTOR_REVERSED"))

    def scandir(path: Any = ".") -> Any:
        full = overlay.original(path)
        changed = full is not None and (_exists(overlay.files + full) or _exists(overlay.removed))
        if full is None or not changed:
            entries = own["scandir"](path)
            return Entries(list(entries)[::-1]) if is_reversed else entries
        entries = list(own["scandir"](overlay.files + full)) if _exists(overlay.files + full) else []
        names = {entry.name for entry in entries}
        if overlay.is_users(full):
            users = [entry for entry in own["scandir"](full) if entry.name not in names]
            entries += [entry for entry in users if not overlay.is_removed(os.path.join(full, entry.name))]
        return Entries(entries) if entries or _exists(overlay.files + full) else own["scandir"](overlay.to_read(path))

    def listdir(path: Any = ".") -> Any:
        if overlay.original(path) is None:
            return own["listdir"](path)
        names = [entry.name for entry in scandir(os.fsdecode(path))]
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        full = overlay.original(path)
        if full is None or dir_fd is not None:
            return own["mkdir"](path, mode, dir_fd=dir_fd)
        if overlay.is_users(full):
            raise FileExistsError(17, "File exists", os.fspath(path))
        own["mkdir"](overlay.to_write(path), mode)
        with contextlib.suppress(OSError):  # libraries in C or Rust write there; the doctor removes it after the run
            own["mkdir"](full, mode)
            note("folder", path=full)
        return overlay.unmark(path)

    for name, new in (("scandir", scandir), ("listdir", listdir), ("mkdir", mkdir)):
        _replace(os, name, new)


def _redirect_removal(overlay: Overlay) -> None:
    def remove(path: Any, *, dir_fd: int | None = None, name: str = "unlink") -> None:
        full = overlay.original(path)
        if full is None or dir_fd is not None:
            return own[name](path, dir_fd=dir_fd)
        if name == "rmdir" and os.listdir(path):
            raise OSError(39, "Directory not empty", os.fspath(path))
        if _exists(overlay.files + full) or not overlay.is_users(full):
            own[name](overlay.files + full)
        return overlay.mark_removed(path)

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        full = overlay.original(path)
        if full is None:
            return own["rmtree"](path, *args, **kwargs)
        if _exists(overlay.files + full) or not overlay.is_users(full):
            own["rmtree"](overlay.files + full, *args, **kwargs)
        return overlay.mark_removed(path)

    def moving(name: str) -> None:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if overlay.original(target) is None and overlay.original(source) is None:
                return own[name](source, target, *args, **kwargs)
            overlay.note_write(target, name)
            own[name](overlay.to_write(source), overlay.to_write(target, keep=False))
            overlay.unmark(target)
            return overlay.mark_removed(source)

        _replace(os, name, move)

    def linking(name: str) -> None:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            is_relative = name == "symlink" and not os.path.isabs(source)  # to the folder of the link
            own[name](source if is_relative else overlay.to_read(source), overlay.to_write(target), *args, **kwargs)
            overlay.unmark(target)

        _replace(os, name, link)

    _replace(os, "unlink", remove)
    _replace(os, "remove", remove)
    _replace(os, "rmdir", functools.partial(remove, name="rmdir"))
    _replace(shutil, "rmtree", rmtree)
    for name in ("rename", "replace"):
        moving(name)
    for name in ("symlink", "link"):
        linking(name)


LIBRARIES = {
    "safetensors": [("safe_open", 0, "r")],
    "safetensors.torch": [("serialize_file", 1, "w"), ("safe_open", 0, "r")],
    "h5py": [("File.__init__", 1, "")],
    "pyarrow": [("memory_map", 0, "r")],
    "sqlite3": [("connect", 0, "a")],
    "torch.jit": [
        ("save", 1, "w"),
        ("load", 0, "r"),
        ("RecursiveScriptModule.save", 1, "w"),
        ("ScriptModule.save", 1, "w"),
    ],
    "torchvision.io": [
        *((name, 1, "w") for name in ("write_png", "write_jpeg")),
        ("write_file", 0, "w"),
        *((name, 0, "r") for name in ("read_file", "read_image")),
    ],
}
"""functions of libraries that open files in C: name, position of the path, and mode ("": the next argument)"""


def redirect_library(name: str) -> None:
    """Redirect the paths that a library, which has just been imported, is given."""
    config = settings.load()
    for attribute, position, mode in LIBRARIES[name] if config.redirect else []:
        target, _, last = f"{name}.{attribute}".rpartition(".")
        holder: Any = sys.modules[name]
        for part in target.removeprefix(name).strip(".").split("."):
            holder = getattr(holder, part) if part else holder
        setattr(holder, last, _with_path(getattr(holder, last), position, mode, Overlay(config.scratch)))


def _with_path(function: Callable[..., Any], position: int, mode: str, overlay: Overlay) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            len(args) <= position
            or str(args[position]).startswith((":", "file:"))
            or not overlay.original(args[position])
        ):
            return function(*args, **kwargs)
        how = mode or kwargs.get("mode", args[position + 1] if len(args) > position + 1 else "r")
        path = args[position]
        if how == "r":
            path = overlay.to_read(path)
        else:
            overlay.note_write(path, how)
            path = overlay.to_write(path, keep=how != "w")
        return function(*args[:position], path, *args[position + 1 :], **kwargs)

    return call


def _refuse(overlay: Overlay, event: str, arguments: tuple) -> None:
    """Refuse to open a file for writing in a way that went around the redirection; log programs that are started."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        full = overlay.original(arguments[0])
        if full is not None and f"{overlay.files}{full}" != os.fsdecode(arguments[0]):
            raise PermissionError(f"the doctor does not let a script write {full} in this way")
    elif event in ("os.system", "subprocess.Popen") and trail.user_calls_library():
        note("program", name=str(arguments[0])[:100], at=user_line())
