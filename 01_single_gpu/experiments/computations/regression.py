"""Fit a line, or a plane of many dimensions, by gradient descent: the same operations on the same data, over and over.

Training a network is this on a larger scale. Two matrix products make a step; a few samples give an accelerator too
little to do between launches, while more samples, and more variables even more so, give it what it is built for.
"""

import functools

import numpy as np

from backends import Array, Backend
from sweep import Inputs, Sweep

STEPS = 200
LEARNING_RATE = 0.1


def draw_line(random: np.random.Generator, samples: int) -> Inputs:
    """Draw samples of y = 2 x + 5 with noise of standard deviation 0.1."""
    return draw(random, samples, coefficients=np.array([[2.0], [5.0]]), noise=0.1)


def draw_plane(random: np.random.Generator, variables: int) -> Inputs:
    """Draw 10,000 samples of a plane whose coefficients are drawn too, from 1 to 9, with noise of 1."""
    return draw(random, 10_000, coefficients=random.integers(1, 10, (variables + 1, 1)), noise=1.0)


def draw(random: np.random.Generator, samples: int, coefficients: np.ndarray, noise: float) -> Inputs:
    """Draw X, (samples, variables + 1), standard normal with a last column of ones, and y, (samples, 1)."""
    x = np.ones((samples, len(coefficients)), dtype=np.float32)
    x[:, :-1] = random.standard_normal((samples, len(coefficients) - 1), dtype=np.float32)
    y = x @ coefficients + noise * random.standard_normal((samples, 1))
    return x, y.astype(np.float32)


def step(beta: Array, x: Array, y: Array) -> Array:
    """Move the coefficients down the gradient of the mean squared error."""
    return beta - (LEARNING_RATE * 2 / len(y)) * (x.T @ (x @ beta - y))


def fit(backend: Backend, x: Array, y: Array) -> Array:
    """Return the coefficients, (variables + 1, 1), that gradient descent reaches from zero."""
    next_step = backend.compile(step)
    beta = x[:1].T * 0
    for _ in range(STEPS):
        beta = next_step(beta, x, y)
    return beta


def closed_form(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the coefficients that gradient descent should reach."""
    return np.linalg.lstsq(x, y)[0]


def describe_line(found: np.ndarray, reference: np.ndarray) -> str:
    """Say which line was found, and which the closed form gives."""
    (slope, intercept), (true_slope, true_intercept) = found.ravel(), reference.ravel()
    return f"found y = {slope:.4f} x + {intercept:.4f}, closed form {true_slope:.4f} x + {true_intercept:.4f}"


of_a_fit = functools.partial(Sweep, compute=fit, reference=closed_form, threaded=("numpy", "torch"))

SWEEPS = [
    of_a_fit(
        title="fit a line",
        unit="samples",
        draw=draw_line,
        quick_sizes=(50, 1000, 10_000, 100_000),
        full_sizes=(50, 1000, 10_000, 100_000, 1_000_000),
        describe=describe_line,
    ),
    of_a_fit(
        title="fit many variables, 10,000 samples",
        unit="variables",
        draw=draw_plane,
        quick_sizes=(1, 10, 100),
        full_sizes=(1, 10, 100, 1000),
    ),
]
