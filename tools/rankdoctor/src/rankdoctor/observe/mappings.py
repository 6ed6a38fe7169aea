"""Dictionaries that give names numbers, such as a vocabulary: what the ranks must have in common."""
# ruff: noqa: ANN401  (it passes on values of any kind)

import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from ..trail import note, trail
from .common import quietly, state

LEAST, MOST = 8, 200_000
"""entries of a dictionary that is looked at"""
SHOWN = 2_000
"""entries that are logged: those whose names have the smallest hashes, so that ranks log the same ones"""
MOST_OBJECTS = 400
MOST_ENTRIES = 20
"""of a dictionary that is taken for a record, in which is looked too"""


@quietly
def look() -> None:
    """Log the dictionaries from names to numbers that the script holds when it makes its first update."""
    seen: set[int] = set()
    for where, value in itertools.islice(held(sys._getframe(1)), MOST_OBJECTS):
        if id(value) not in seen and is_numbering(value):
            seen.add(id(value))
            hashed = sorted((zlib.crc32(name.encode()), name, number) for name, number in value.items())[:SHOWN]
            note(
                "mapping",
                name=where,
                at=line_of(where),
                size=len(value),
                entries={name[:80]: number for _, name, number in hashed},
            )


def is_numbering(value: Any) -> bool:
    """Return whether a dictionary numbers names: all numbers differ, and few are left out."""
    if type(value).__name__ not in ("dict", "OrderedDict", "Vocab") or not isinstance(value, dict):
        return False
    if not LEAST <= len(value) <= MOST or not all(type(key) is str for key in value):
        return False
    numbers = list(value.values())
    if not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        return False
    return min(numbers) >= 0 and max(numbers) < 2 * len(numbers) + 16


def _is_plain(value: Any) -> bool:
    return not callable(value)


def held(frame: FrameType | None, is_holder: Callable[[Any], bool] = _is_plain) -> Iterator[tuple[str, Any]]:
    """Yield what the script's functions hold, with its name: variables, and what their objects and dictionaries hold.

    Objects in which is to be looked are those for which ``is_holder`` is true.
    """
    scopes: list[dict[str, Any]] = []
    while frame:
        if trail.kind_of(frame.f_code.co_filename) > 0:
            scopes.append(frame.f_locals)
            if not any(frame.f_globals is scope for scope in scopes):
                scopes.append(frame.f_globals)
        frame = frame.f_back
    for scope in scopes:
        for name, value in list(scope.items()):
            if name.startswith("__") or isinstance(value, ModuleType | type):
                continue
            yield name, value
            yield from _inside(name, value, 2, is_holder)


def _inside(name: str, value: Any, depth: int, is_holder: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds in its attributes, or a small dictionary in its entries, and these in theirs."""
    inside = value if type(value) is dict and len(value) <= MOST_ENTRIES else getattr(value, "__dict__", None)
    if not depth or not isinstance(inside, dict) or not is_holder(value):
        return
    for key, inner in list(inside.items())[:50]:
        if type(key) is str:
            yield f"{name}.{key}", inner
            yield from _inside(f"{name}.{key}", inner, depth - 1, is_holder)


def line_of(where: str) -> str:
    """Return the line of the script that first gives something this name; "?" if none is found."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        return "?"
    name = re.escape(where.rpartition(".")[2])
    with open(main, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if re.search(rf"(\b|\.){name}\s*((:|,)[^=]+)?=[^=]", line):
                return f"{main}:{number}"
    return "?"


def at_first_update() -> None:
    """Look at what the script holds, once, if it has joined other ranks."""
    if state.world > 1:
        look()
