"""How long an all-reduce takes, and from that how well data-parallel training scales: the alpha-beta model.

A message of b bytes takes alpha + beta * b seconds (Hockney 1994). A ring all-reduce over n ranks sends 2 (n - 1)
messages one after the other, each of b / n bytes (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"), so it takes 2 (n - 1) alpha + 2 (n - 1) / n beta b. What the model leaves out:
links of different speed, others on the network, the cost of adding, and that on a CPU communication takes time from
computing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BACKWARD_SHARE = 2 / 3
"""of a step's compute: backward computes two gradients, of inputs and of weights, where forward computes once"""


@dataclass(frozen=True)
class Network:
    """What connects the ranks."""

    alpha: float
    """seconds that a message takes however small it is"""
    beta: float
    """seconds per byte"""

    def all_reduce_seconds(self, nbytes: float, ranks: int) -> float:
        """Return how long a ring all-reduce of so many bytes takes."""
        messages = 2 * (ranks - 1)
        return messages * self.alpha + messages / ranks * self.beta * nbytes


@dataclass(frozen=True)
class Step:
    """A training step of one rank."""

    compute_seconds: float
    """without any communication"""
    bucket_bytes: tuple[float, ...]
    """gradients of each bucket, in the order in which backward fills the buckets; there is an all-reduce for each"""


def equal_buckets(gradient_bytes: float, buckets: int) -> tuple[float, ...]:
    """Return the bytes of so many buckets of equal size."""
    return (gradient_bytes / buckets,) * buckets


def bus_bandwidth_factor(ranks: int) -> float:
    """Return what to multiply bytes per second of an all-reduce by to get those on the wire of each rank.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks


def fit(measured: Sequence[tuple[float, int, float]]) -> Network:
    """Return the network whose times are nearest to those measured, by the squares of the relative errors.

    Args:
        measured: (bytes, ranks, seconds) of each all-reduce; at least two different sizes.
    """
    nbytes, ranks, seconds = np.array(measured, dtype=float).T
    messages = 2 * (ranks - 1)
    terms = np.stack([messages, messages / ranks * nbytes], axis=1) / seconds[:, None]
    target = np.ones(len(seconds))
    alpha, beta = np.linalg.lstsq(terms, target, rcond=None)[0]
    if alpha < 0:  # a negative time is impossible: leave the term out
        alpha, beta = 0.0, np.linalg.lstsq(terms[:, 1:], target, rcond=None)[0][0]
    elif beta < 0:
        alpha, beta = np.linalg.lstsq(terms[:, :1], target, rcond=None)[0][0], 0.0
    return Network(float(alpha), float(beta))


def step_seconds(step: Step, network: Network, ranks: int, overlap: bool) -> float:
    """Return how long a step takes with communication.

    With ``overlap``, each bucket is sent as soon as backward has filled it, one after the other, at no cost to the
    computing; each takes the same share of backward to fill. So only the last bucket cannot overlap with it. Without,
    all are sent when backward has ended.
    """
    all_reduces = [network.all_reduce_seconds(nbytes, ranks) for nbytes in step.bucket_bytes]
    if not overlap:
        return step.compute_seconds + sum(all_reduces)
    backward = BACKWARD_SHARE * step.compute_seconds
    free = 0.0  # when the network has sent what came before
    for number, seconds in enumerate(all_reduces, start=1):
        filled = step.compute_seconds - backward * (1 - number / len(all_reduces))
        free = max(free, filled) + seconds
    return free


def weak_efficiency(step: Step, network: Network, ranks: int, overlap: bool) -> float:
    """Return the share of its time that a rank computes: 1 is ideal."""
    return step.compute_seconds / step_seconds(step, network, ranks, overlap)


def beta_for(efficiency: float, step: Step, alpha: float, ranks: int, overlap: bool) -> float:
    """Return the seconds per byte at which the model gives this efficiency; 0 if alpha alone costs more."""
    low, high = 1e-15, 1e-3
    if weak_efficiency(step, Network(alpha, low), ranks, overlap) < efficiency:
        return 0.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        if weak_efficiency(step, Network(alpha, middle), ranks, overlap) > efficiency:
            low = middle
        else:
            high = middle
    return low
