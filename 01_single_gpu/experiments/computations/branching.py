"""A serial loop in which the data decide which way to go, and the same thing written so that it can run in parallel.

    y[i] = (x[i] if other[i] is even else another[i]) + y[i - 1]

Each step waits for the one before it: as it stands, a thousand cores can do no more than one. But the choice does not
depend on y, so it can be made everywhere at once, and a running sum is something that parallel machines can do.
"""

import numpy as np

from backends import Array, Backend
from sweep import Inputs, Sweep


def draw(random: np.random.Generator, size: int) -> Inputs:
    """Draw x, other and another, (size,) each; other starts with an even number, so that y starts with x."""
    other = random.integers(0, 100, size, dtype=np.int32)
    other[0] = 0
    return random.random(size, dtype=np.float32), other, random.random(size, dtype=np.float32)


def one_by_one(backend: Backend, x: Array, other: Array, another: Array) -> Array:
    """Return y as the formula says. On an accelerator every `if` fetches a number and waits for it."""
    y = x + 0  # a copy
    for i in range(1, len(y)):
        y[i] = (y[i] if other[i] % 2 == 0 else another[i]) + y[i - 1]
    return y


def cumulative_sum(backend: Backend, x: Array, other: Array, another: Array) -> Array:
    """Return y in two steps over whole arrays: choose, then sum up."""
    chosen = backend.xp.where(other % 2 == 0, x, another)
    return backend.xp.cumsum(chosen, 0)


def formula(x: np.ndarray, other: np.ndarray, another: np.ndarray) -> np.ndarray:
    """Return y as the formula says, in Python's own float64 numbers."""
    y = [0.0]
    for if_even, number, if_odd in zip(x.tolist(), other.tolist(), another.tolist(), strict=True):
        y.append((if_even if number % 2 == 0 else if_odd) + y[-1])
    return np.array(y[1:])


SWEEPS = [
    Sweep(
        title="loop with a branch",
        unit="elements",
        draw=draw,
        compute=one_by_one,
        reference=formula,
        quick_sizes=(100, 1000, 10_000),
        full_sizes=(100, 1000, 10_000, 100_000),
        without={"jax": "its arrays cannot be changed in place"},
    ),
    Sweep(
        title="the same as a cumulative sum",
        unit="elements",
        draw=draw,
        compute=cumulative_sum,
        reference=formula,
        quick_sizes=tuple(10**i for i in range(2, 7)),
        full_sizes=tuple(10**i for i in range(2, 8)),
        threaded=("torch",),
    ),
]
