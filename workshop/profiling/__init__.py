"""Instruments that show where the time goes."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)

try:
    from line_profiler import profile
except ImportError:  # then no lines can be profiled

    def profile(function: F) -> F:
        """Return the function as it is."""
        return function


__all__ = ["profile"]
