"""Comparisons of an ordinary run with one under a provocation."""

from collections.abc import Callable, Iterator

from ..events import Run
from .base import Finding

COMPARISONS: list[Callable[[list[Run], list[str], dict[str, str]], Iterator[Finding]]] = []
