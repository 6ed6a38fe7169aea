"""Fit the parameters of a curve (see curves.py) to kernels that were timed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from .curves import Curves, Gpu, Parameters, Work


@dataclass(frozen=True)
class Timed:
    """Kernels that were timed together."""

    group: str
    """the curve that they belong to"""
    works: Sequence[Work]
    """one after the other"""
    seconds: float


def error(model: Curves, it: Timed) -> float:
    """Return the logarithm of the factor by which the curves are wrong."""
    return abs(log(sum(map(model.seconds, it.works)) / it.seconds))


def fitted(
    gpu: Gpu, group: str, rows: Sequence[Timed], start: Parameters, fixed: Sequence[str] = (), step: float = 0.35
) -> dict[str, float]:
    """Return the parameters of a curve of this GPU with which it is near these rows.

    Each parameter in turn is multiplied and divided by a factor, as long as this helps; the factor becomes smaller.

    Args:
        gpu: the GPU that was timed.
        group: the name of the curve.
        rows: what was timed.
        start: the parameters to begin with.
        fixed: names of those that stay.
        step: logarithm of the first factor.
    """

    def cost(parameters: Mapping[str, float]) -> float:
        model = Curves(replace(gpu, measured={**gpu.measured, group: parameters}))
        errors = [error(model, it) for it in rows]
        # Near its start if the rows do not say: without this, a floor that no row is small enough for is anything.
        away = sum(abs(log(parameters[name] / value)) for name, value in start.items())
        return sum(e + e * e for e in errors) / max(len(errors), 1) + 1e-2 * away

    best = dict(start)
    least = cost(best)
    while step > 0.01:
        better = False
        for name in [it for it in best if it not in fixed]:
            for factor in (exp(step), exp(-step)):
                tried = best | {name: best[name] * factor}
                if (value := cost(tried)) < least:
                    best, least, better = tried, value, True
        step *= 1.0 if better else 0.5
    return {name: float(f"{value:.4g}") for name, value in best.items()}
