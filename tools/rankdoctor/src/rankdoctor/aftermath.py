"""Find what a run has changed in the user's folders past the redirection: by libraries in C, by other programs."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

MOST_FILES = 20_000
"""of the user's that are looked at"""
LEFT_OUT = {".git", "__pycache__", ".venv", ".site", "build", "node_modules"}
Files = dict[str, tuple[int, int]]


def snapshot(folders: Iterable[str], without: Path) -> Files:
    """Return time of change and size of the files below these folders, at most `MOST_FILES`.

    Left out are what lies below ``without``, and the files that the doctor's own output goes to.
    """
    found: Files = {}
    outputs = [os.fstat(number) for number in (1, 2)]
    for folder in dict.fromkeys(map(os.path.realpath, folders)):
        for here, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in LEFT_OUT and f"{here}/{name}" != str(without)]
            for name in names:
                with contextlib.suppress(OSError):
                    stat = os.lstat(path := os.path.join(here, name))
                    if not any(os.path.samestat(stat, output) for output in outputs):
                        found[path] = stat.st_mtime_ns, stat.st_size
            if len(found) > MOST_FILES:
                return found
    return found


def changed(before: Files, after: Files) -> list[str]:
    """Return the files that are new, or other than before; nothing can be said if there are too many."""
    if max(len(before), len(after)) > MOST_FILES:
        return []
    return sorted(path for path, what in after.items() if before.get(path) != what)


def undo_folders(scratch: Path) -> list[str]:
    """Remove the folders that the script made, which really exist for the sake of libraries in C or Rust.

    They did not exist before the run, so what is in them is the script's. It goes to where all else went.

    Returns:
        The files that were in them.
    """
    made = set()
    for file in (scratch / "logs").glob("*.jsonl"):
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["e"] == "folder":
                    made.add(event["path"])
    moved = []
    for folder in sorted(made, key=len, reverse=True):  # those inside of others first
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if not os.path.isdir(path) or os.path.islink(path):
                    moved.append(path)
                    os.makedirs(f"{scratch}/files{folder}", exist_ok=True)
                    shutil.move(path, f"{scratch}/files{path}")
            os.rmdir(folder)
    return sorted(moved)
