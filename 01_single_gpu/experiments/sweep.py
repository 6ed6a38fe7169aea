"""Measure one computation over a range of sizes, on every backend, and check every result before it is timed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from threadpoolctl import threadpool_limits

from backends import Array, Backend
from lab.timing import measure

Inputs = tuple[np.ndarray, ...]

QUICK_SECONDS, FULL_SECONDS = 0.2, 0.5
"""how long to repeat each measurement, at least"""


class WrongResultError(RuntimeError):
    """A backend computed something else than the float64 reference: its time would mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One computation and the sizes to try."""

    title: str
    unit: str
    """what the size counts"""
    quick_sizes: tuple[int, ...]
    full_sizes: tuple[int, ...]
    draw: Callable[[np.random.Generator, int], Inputs]
    """(random generator, size) -> the inputs"""
    compute: Callable[..., Array]
    """(backend, *inputs on its device) -> the result, on its device"""
    reference: Callable[..., np.ndarray]
    """(*inputs in float64) -> what the result should be, best found another way than ``compute`` does"""
    tolerance: float = 1e-4
    """largest relative error, in the 2-norm, that float32 arithmetic explains"""
    threaded: tuple[str, ...] = ()
    """backends that can use several CPU threads here"""
    compiled: bool = False
    """whether ``compute`` compiles, so that torch.compile has something to do"""
    without: dict[str, str] = field(default_factory=dict)
    """backends that cannot do this, and why"""
    describe: Callable[[np.ndarray, np.ndarray], str] | None = None
    """(result, reference) -> the note of a row"""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement, or the note why there is none."""

    experiment: str
    sweep: str = ""
    backend: str
    unit: str = ""
    device: str = ""
    threads: int | None = None
    """CPU threads; None where the library decides, or where an accelerator computes"""
    copied: bool = False
    """whether copying the inputs from the CPU to the device is part of the time"""
    size: int | None = None
    seconds: float | None = None
    """median"""
    spread: float | None = None
    """interquartile range, in seconds"""
    repeats: int | None = None
    relative_error: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """Who computed, in words."""
        if self.threads:
            return f"{self.backend} ({self.threads} thread{'s' if self.threads > 1 else ''})"
        device = f" on {'CPU' if self.device == 'cpu' else self.device}" if self.device else ""
        return f"{self.backend}{device}{' (copy counted)' if self.copied else ''}"

    @property
    def on_accelerator(self) -> bool:
        """Whether it was computed on an accelerator."""
        return self.device not in ("", "cpu")


def run_sweep(
    experiment: str, sweep: Sweep, backends: list[Backend], threads: list[int], quick: bool, seed: int = 0
) -> Iterator[Measurement]:
    """Measure ``sweep`` at every size on every backend; on accelerators with and without the copy of the inputs.

    Args:
        experiment: name that the rows carry.
        sweep: what to measure.
        backends: with what.
        threads: CPU thread counts to try, where threads can be used.
        quick: the small sizes, and fewer repeats.
        seed: of the inputs; every backend gets the same ones.

    Raises:
        WrongResultError: a result is further from the reference than the tolerance.
    """
    for name, reason in sweep.without.items():
        if any(backend.name == name for backend in backends):
            yield Measurement(experiment=experiment, sweep=sweep.title, backend=name, note=f"not measured: {reason}")
    sizes, seconds = (sweep.quick_sizes, QUICK_SECONDS) if quick else (sweep.full_sizes, FULL_SECONDS)
    for size in sizes:
        inputs = sweep.draw(np.random.default_rng(seed), size)
        reference = sweep.reference(*(array.astype(np.float64) for array in inputs))
        for backend in backends:
            if backend.name in sweep.without or (backend.name == "torch.compile" and not sweep.compiled):
                continue
            for limit in _limits(sweep, backend, threads):
                for copied in (False, True) if backend.on_accelerator else (False,):
                    with threadpool_limits(limit):  # of torch too; None leaves them as they are
                        found = _measure_one(sweep, backend, inputs, reference, copied, seconds)
                    yield Measurement(
                        experiment=experiment,
                        sweep=sweep.title,
                        unit=sweep.unit,
                        backend=backend.name,
                        device=backend.device,
                        threads=limit,
                        copied=copied,
                        size=size,
                        **found,
                    )


def _limits(sweep: Sweep, backend: Backend, threads: list[int]) -> list[int | None]:
    if backend.on_accelerator or backend.name == "jax":  # JAX keeps to the CPUs of the process by itself
        return [None]
    return list(threads) if backend.name in sweep.threaded else [1]


def _measure_one(
    sweep: Sweep,
    backend: Backend,
    inputs: Inputs,
    reference: np.ndarray,
    copied: bool,
    min_seconds: float,
) -> dict:
    there = tuple(backend.put(array) for array in inputs)
    for array in there:
        backend.wait(array)

    def run() -> Array:
        arrays = tuple(backend.put(array) for array in inputs) if copied else there
        return backend.wait(sweep.compute(backend, *arrays))

    try:
        result = backend.fetch(run())  # this first call is also the warm-up
    except NotImplementedError as missing:  # an operation that this library lacks on this device
        return {"note": f"not measured: {str(missing).splitlines()[0]}"}
    error = relative_error(result, reference)
    if not error <= sweep.tolerance:  # so written, NaN is wrong too
        raise WrongResultError(
            f"{backend.name} on {backend.device}, {sweep.title}: relative error {error:.1e} against the float64 "
            f"reference, allowed are {sweep.tolerance:.0e}"
        )
    timing = measure(run, min_seconds)
    return {
        "seconds": timing.seconds,
        "spread": timing.spread,
        "repeats": timing.repeats,
        "relative_error": error,
        "note": sweep.describe(result, reference) if sweep.describe else "",
    }


def relative_error(result: np.ndarray, reference: np.ndarray) -> float:
    """Return |result - reference| / |reference| in the 2-norm.

    Raises:
        WrongResultError: the shapes differ.
    """
    if result.shape != reference.shape:
        raise WrongResultError(f"the result has shape {result.shape}, the reference {reference.shape}")
    difference = np.linalg.norm(np.ravel(result - reference))
    return float(difference / np.linalg.norm(np.ravel(reference)))
