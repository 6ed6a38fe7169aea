"""Instruments that show where the time goes."""

from line_profiler import profile

__all__ = ["profile"]
