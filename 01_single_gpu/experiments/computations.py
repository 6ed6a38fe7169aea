"""The computations that `cpu_or_gpu.py` measures. ``xp`` is the library: numpy, torch, or one with the same names."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""an array of any of the libraries"""
Inputs = tuple[np.ndarray, ...]
STEPS, LEARNING_RATE = 200, 0.1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One computation, and the sizes to try."""

    title: str
    unit: str
    """what the size counts"""
    sizes: tuple[int, ...]
    draw: Callable[[np.random.Generator, int], Inputs]
    """(random generator, size) -> the inputs in float32"""
    compute: Callable[..., Array]
    """(xp, *inputs on the device) -> the result, on the device"""
    reference: Callable[..., np.ndarray]
    """(*inputs in float64) -> what the result should be, if possible found in another way than ``compute`` does"""
    threaded: tuple[str, ...] = ()
    """libraries that can use several CPU threads here"""


def draw_systems(random: np.random.Generator, systems: int, n: int) -> Inputs:
    """Draw A, (systems, n, n), and b, (systems, n, 1); the diagonal keeps A far from singular."""
    a = random.standard_normal((systems, n, n), dtype=np.float32) / np.float32(np.sqrt(n))
    a += 3 * np.eye(n, dtype=np.float32)
    return a, random.standard_normal((systems, n, 1), dtype=np.float32)


def draw_arrays(random: np.random.Generator, size: int, count: int) -> Inputs:
    """Draw ``count`` arrays (size,)."""
    return tuple(random.random(size, dtype=np.float32) for _ in range(count))


def draw_branching(random: np.random.Generator, size: int) -> Inputs:
    """Draw x, which, another, (size,) each: ``which`` says whether a step takes x (even) or another (odd)."""
    x, another = draw_arrays(random, size, 2)
    return x, random.integers(0, 100, size, dtype=np.int32), another


def one_by_one(xp: Any, x: Array, which: Array, another: Array) -> Array:  # noqa: ANN401
    """Return y[i] = y[i - 1] + (x[i] if which[i] is even else another[i]), step by step.

    On an accelerator every `if` fetches a number and waits for it.
    """
    y = x + 0  # a copy
    before = 0.0
    for i in range(len(y)):
        before = before + (x[i] if which[i] % 2 == 0 else another[i])
        y[i] = before
    return y


def cumulative_sum(xp: Any, x: Array, which: Array, another: Array) -> Array:  # noqa: ANN401
    """Return the same in two operations on whole arrays: choose, then sum up."""
    return xp.cumsum(xp.where(which % 2 == 0, x, another), 0)


def chain(xp: Any, x: Array, y: Array, z: Array) -> Array:  # noqa: ANN401
    """Return the total of three arrays, each of which depends on the one before; ()."""
    x = x + 3
    y = y + x
    z = z + y
    return (x + y + z).sum()


def draw_line(random: np.random.Generator, samples: int) -> Inputs:
    """Draw samples of y = 2 x + 5 with noise of standard deviation 0.1: X, (samples, 2), and y, (samples, 1)."""
    return draw_plane(random, samples, np.array([[2.0], [5.0]]), noise=0.1)


def draw_variables(random: np.random.Generator, variables: int) -> Inputs:
    """Draw 10,000 samples of a plane whose coefficients are random too, from 1 to 9, with noise of 1."""
    return draw_plane(random, 10_000, random.integers(1, 10, (variables + 1, 1)), noise=1.0)


def draw_plane(random: np.random.Generator, samples: int, coefficients: np.ndarray, noise: float) -> Inputs:
    """Draw X, (samples, variables + 1), with a last column of ones, and y, (samples, 1)."""
    x = np.ones((samples, len(coefficients)), dtype=np.float32)
    x[:, :-1] = random.standard_normal((samples, len(coefficients) - 1), dtype=np.float32)
    y = x @ coefficients + noise * random.standard_normal((samples, 1))
    return x, y.astype(np.float32)


def fit(xp: Any, x: Array, y: Array) -> Array:  # noqa: ANN401
    """Return the coefficients, (variables + 1, 1), that gradient descent on the squared error reaches from zero."""
    beta = x[:1].T * 0
    for _ in range(STEPS):
        beta = beta - (LEARNING_RATE * 2 / len(y)) * (x.T @ (x @ beta - y))
    return beta


systems = functools.partial(
    Problem, compute=lambda xp, a, b: xp.linalg.solve(a, b), reference=np.linalg.solve, threaded=("numpy", "torch")
)
regression = functools.partial(
    Problem, compute=fit, reference=lambda x, y: np.linalg.lstsq(x, y)[0], threaded=("numpy", "torch")
)
branching = functools.partial(
    Problem, unit="elements", draw=draw_branching, reference=functools.partial(cumulative_sum, np)
)

PROBLEMS = {
    # A small system is solved before the launch on a GPU is paid for; only very many of them at once are worth it.
    "one_system": systems(
        title="one n x n system",
        unit="equations",
        sizes=(100, 300, 1000, 2000, 10_000),
        draw=lambda random, n: draw_systems(random, 1, n),
    ),
    "many_systems": systems(
        title="many 10 x 10 systems",
        unit="systems",
        sizes=(10, 100, 1000, 10_000, 100_000),
        draw=lambda random, count: draw_systems(random, count, 10),
    ),
    # No element waits for another, and there is next to nothing to compute: the launch counts, then the memory.
    "elementwise": Problem(
        title="y = x + 3",
        unit="elements",
        sizes=tuple(10**i for i in range(2, 9)),
        draw=lambda random, size: draw_arrays(random, size, 1),
        compute=lambda xp, x: x + 3,
        reference=lambda x: x + 3,
        threaded=("torch",),  # numpy adds with one thread
    ),
    # Each step waits for the one before it. But the choice does not depend on y, so it can be made everywhere at once.
    "branching": branching(title="loop with a branch", sizes=(100, 1000, 10_000, 100_000), compute=one_by_one),
    "cumulative_sum": branching(
        title="the same as a cumulative sum",
        sizes=tuple(10**i for i in range(2, 8)),
        compute=cumulative_sum,
        threaded=("torch",),
    ),
    # Each operation reads its arrays from memory and writes its result back.
    "chained": Problem(
        title="chain of four sums, then the total",
        unit="elements",
        sizes=tuple(10**i for i in range(2, 9)),
        draw=lambda random, size: draw_arrays(random, size, 3),
        compute=chain,
        reference=lambda x, y, z: (3 * (x + 3) + 2 * y + z).sum(),
        threaded=("torch",),
    ),
    # Training on the smallest scale: the same operations on the same data, step after step.
    "line": regression(
        title="fit a line", unit="samples", sizes=(50, 1000, 10_000, 100_000, 1_000_000), draw=draw_line
    ),
    "variables": regression(
        title="fit many variables, 10,000 samples", unit="variables", sizes=(1, 10, 100, 1000), draw=draw_variables
    ),
}
