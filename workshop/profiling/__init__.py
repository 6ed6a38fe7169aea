"""Instruments that show where the time goes."""

from line_profiler import profile

from workshop.profiling.annotate import annotate

__all__ = ["annotate", "profile"]
