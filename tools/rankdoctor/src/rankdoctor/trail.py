"""Writing events, and finding the user's line: what all observers need. It does not import torch.

Each process of the script appends its events to LOGS/PID.jsonl, one JSON object a line.
"""

import contextlib
import io
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from . import settings
from .settings import is_own

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_open = io.open  # as it was before files were redirected
_getcwd = os.getcwd


class Trail:
    """The file of this process, and where the process is."""

    def __init__(self) -> None:
        config = settings.load()
        self.logs, self.root = config.logs, config.root
        self.began = time.perf_counter()
        self.file: Any = None
        self.step = 0
        """updates so far"""
        self.kinds: dict[str, int] = {}
        os.register_at_fork(after_in_child=self.forget_file)

    def forget_file(self) -> None:
        """Let a forked process open a file of its own."""
        self.file = None

    def note(self, kind: str, **fields: object) -> None:
        """Append an event."""
        with contextlib.suppress(OSError):  # a full disk is the doctor's problem, not the script's
            self._write(kind, fields)

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        if self.file is None:
            self.file = _open(f"{self.logs}/{os.getpid()}.jsonl", "a", buffering=1)
            self.note("process", pid=os.getpid(), parent=os.getppid(), rank=os.environ.get("RANK"), argv=sys.argv[:1])
        event = {"e": kind, "step": self.step, "t": round(time.perf_counter() - self.began, 4), **fields}
        self.file.write(json.dumps(event) + "\n")

    def kind_of(self, file: str) -> int:
        """Return 0 for a file of a library, 1 for one of the user's elsewhere, 2 for one in the script's folder."""
        kind = self.kinds.get(file)
        if kind is None:
            path = os.path.join(_getcwd(), file)
            is_library = file.startswith("<") or path.startswith(LIBRARIES) or "site-packages" in path or is_own(path)
            kind = self.kinds[file] = 0 if is_library else 1 + path.startswith(self.root + os.sep)
        return kind

    def user_line(self, skip: Callable[[FrameType], bool] | None = None) -> str:
        """Return file:line of the innermost frame in the script's folder, else of the innermost of the user's."""
        frame = self.user_frame(skip)
        return self.place_of(frame) if frame else "?"

    def user_frame(self, skip: Callable[[FrameType], bool] | None = None) -> FrameType | None:
        """Return the innermost frame in the script's folder, else the innermost of the user's."""
        frame: FrameType | None = sys._getframe(1)
        other = None
        while frame:
            kind = self.kind_of(frame.f_code.co_filename)
            if (kind == 2 or (kind == 1 and not other)) and not (skip and skip(frame)):
                if kind == 2:
                    return frame
                other = frame
            frame = frame.f_back
        return other

    def user_call(self) -> tuple[str, int]:
        """Return the user's line, and which call it is by its place in the code: one line can have several."""
        frame = self.user_frame()
        return (self.place_of(frame), frame.f_lasti) if frame else ("?", 0)

    def place_of(self, frame: FrameType) -> str:
        """Return file:line of a frame."""
        return f"{os.path.join(_getcwd(), frame.f_code.co_filename)}:{frame.f_lineno}"

    def caller_is_outside(self, folder: str) -> bool:
        """Return whether what called the function that calls this one is in no file of ``folder``."""
        return not sys._getframe(2).f_code.co_filename.startswith(folder)

    def user_calls_library(self) -> bool:
        """Return whether the innermost frame outside of the doctor and the standard library is the user's."""
        frame: FrameType | None = sys._getframe(1)
        while frame and is_passed_over(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None and self.kind_of(frame.f_code.co_filename) > 0


def is_passed_over(file: str) -> bool:
    """Return whether a file is part of the doctor or of the standard library, in which site-packages can lie."""
    return is_own(file) or (file.startswith((STANDARD_LIBRARY, "<")) and "site-packages" not in file)


trail = Trail()
note = trail.note
user_line = trail.user_line
