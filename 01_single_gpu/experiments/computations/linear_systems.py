"""Solve A x = b: one large system, or many small ones.

One large system is the best case of an accelerator, about 2/3 n^3 operations on n^2 numbers. A small one is over before
the launch is paid for; only very many of them, handed over at once, are worth the trip.
"""

import functools

import numpy as np

from backends import Array, Backend
from sweep import Inputs, Sweep


def draw_one(random: np.random.Generator, n: int) -> Inputs:
    """Draw one system of n equations."""
    return draw(random, systems=1, n=n)


def draw_small(random: np.random.Generator, systems: int) -> Inputs:
    """Draw many systems of 10 equations."""
    return draw(random, systems=systems, n=10)


def draw(random: np.random.Generator, systems: int, n: int) -> Inputs:
    """Draw A, (systems, n, n), and b, (systems, n, 1); the diagonal keeps A far from singular."""
    a = random.standard_normal((systems, n, n), dtype=np.float32) / np.float32(np.sqrt(n))
    a += 3 * np.eye(n, dtype=np.float32)
    return a, random.standard_normal((systems, n, 1), dtype=np.float32)


def solve(backend: Backend, a: Array, b: Array) -> Array:
    """Return x of every system, (systems, n, 1)."""
    return backend.xp.linalg.solve(a, b)


of_systems = functools.partial(Sweep, compute=solve, reference=np.linalg.solve, threaded=("numpy", "torch"))

SWEEPS = [
    of_systems(
        title="one n x n system",
        unit="equations",
        draw=draw_one,
        quick_sizes=(100, 300, 1000, 2000),
        full_sizes=(100, 300, 1000, 3000, 10_000),
    ),
    of_systems(
        title="many 10 x 10 systems",
        unit="systems",
        draw=draw_small,
        quick_sizes=(10, 100, 1000, 10_000),
        full_sizes=(10, 100, 1000, 10_000, 100_000),
    ),
]
