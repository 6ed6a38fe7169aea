"""The compiled library in a process of the command: its settings, counters and observer."""

import atexit
import ctypes
import functools
import os
from collections.abc import Callable

from .interface import COUNTERS, Notice, Settings

OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)

_observer: object = None  # kept, because C++ holds only its address


def load() -> ctypes.CDLL:
    """Return the library, which this process has loaded when it started."""
    return ctypes.CDLL(os.environ["NULLGPU_LIBRARY"])


@functools.cache
def settings() -> Settings:
    """Return what this process was told."""
    return Settings.load(os.environ["NULLGPU_SETTINGS"])


def counters() -> dict[str, int]:
    """Return what has been counted in this process so far."""
    library = load()
    library.nullgpu_counters.restype = ctypes.POINTER(ctypes.c_int64 * len(COUNTERS))
    return dict(zip(COUNTERS, library.nullgpu_counters().contents, strict=True))


def observe(callback: Callable[[int, str, int, bool], None], *kinds: Notice) -> None:
    """Let ``callback(kind, name, bytes, pageable)`` be called in each wait, copy or collective, until Python ends."""
    global _observer

    def call(kind: int, name: bytes, size: int, pageable: int) -> None:
        callback(kind, name.decode(), size, bool(pageable))

    _observer = OBSERVER(call)
    load().nullgpu_observe(_observer, sum(1 << kind for kind in kinds))
    atexit.register(load().nullgpu_observe, None, 0)  # threads of PyTorch go on for a while, without Python
