"""Instruments that show where the time goes."""

from workshop.profiling.annotate import annotate

try:
    from line_profiler import profile
except ImportError:  # then nobody looks at lines
    profile = lambda function: function  # noqa: E731

__all__ = ["annotate", "profile"]
