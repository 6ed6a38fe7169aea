"""CPU or GPU? The same computations with one CPU thread, with several, and on an accelerator, from small to large.

    python experiments/cpu_or_gpu.py --quick true                          # without the largest size of each
    python experiments/cpu_or_gpu.py --problem branching --problem line    # some of the computations

You should see that no library and no device is the fastest at every size, and that one CPU thread is hard to beat while
the work is small. A time runs from asking for a result until it is there, and is the median over warm repeats; every
result is compared with a float64 reference before it is timed. The computations are in computations.py: read it first.
NumPy and PyTorch are measured, and CuPy and JAX where they are installed.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from computations import PROBLEMS, Problem
from lab import results
from lab.flags import Parser
from lab.timing import Timing, cpu_share, measure
from workshop.errors import run_reporting_user_errors, warn
from workshop.hardware import available_cpus, pick_device

TOLERANCE = 1e-4
"""largest relative error, in the 2-norm, that float32 arithmetic explains"""
CLEAR_LEAD = 0.9
"""of the other's time that the faster one may take at most, to be called faster"""
SECONDS = 0.2
"""how long each measurement is repeated, at least"""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library on one device."""

    name: str
    xp: Any
    accelerator: bool = False
    put: Callable[[np.ndarray], Any] = lambda array: array
    """copy an array of numpy to the device"""
    wait: Callable[[Any], Any] = lambda array: array
    """return an array when it is there: launching on an accelerator returns long before the work is done"""
    fetch: Callable[[Any], np.ndarray] = np.asarray
    """copy a result back into an array of numpy"""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How long one problem took."""

    size: int
    label: str
    """who computed: library, threads or device"""
    timing: Timing
    threads: int | None = None
    """CPU threads; None on an accelerator, or where the library decides"""
    accelerator: bool = False
    copied: bool = False
    """whether the time includes copying the inputs to the device"""

    @property
    def ends(self) -> tuple[float, float]:
        """Median minus and plus half of the interquartile range, in seconds."""
        return self.timing.seconds - self.timing.spread / 2, self.timing.seconds + self.timing.spread / 2


def libraries() -> list[Library]:
    """Return those that this machine has."""
    found = [Library(name="numpy", xp=np), torch_on(torch.device("cpu"))]
    if (device := pick_device()).type != "cpu":
        found.append(torch_on(device))
    with suppress(ImportError):
        import cupy

        synchronize = cupy.cuda.get_current_stream().synchronize
        found.append(
            Library(
                name="cupy on the GPU",
                xp=cupy,
                accelerator=True,
                put=cupy.asarray,
                wait=lambda array: (synchronize(), array)[1],
                fetch=cupy.asnumpy,
            )
        )
    with suppress(ImportError):
        import jax

        where, on_gpu = jax.default_backend(), jax.default_backend() != "cpu"
        wait = jax.block_until_ready
        found.append(Library(name=f"jax on {where}", xp=jax.numpy, accelerator=on_gpu, put=jax.device_put, wait=wait))
    return found


def torch_on(device: torch.device) -> Library:
    """Return PyTorch on a device."""
    on_cpu = device.type == "cpu"

    def wait(array: torch.Tensor) -> torch.Tensor:
        if not on_cpu:
            torch.accelerator.synchronize()
        return array

    return Library(
        name="torch" if on_cpu else f"torch on {device.type}",
        xp=torch,
        accelerator=not on_cpu,
        put=lambda array: torch.from_numpy(array).to(device),
        wait=wait,
        fetch=lambda array: array.cpu().numpy(),
    )


def sweep(problem: Problem, quick: bool, found: list[Library]) -> Iterator[Measurement]:
    """Measure a problem at every size with every library; on accelerators also with the copy of the inputs."""
    for size in problem.sizes[:-1] if quick else problem.sizes:
        inputs = problem.draw(np.random.default_rng(0), size)
        reference = problem.reference(*(array.astype(np.float64) for array in inputs))
        for library in found:
            if library.name.startswith("jax") and problem.title == "loop with a branch":
                continue  # its arrays cannot be changed in place
            threads = sorted({1, available_cpus()}) if library.name in problem.threaded else [1]
            for limit in threads if library.name in ("numpy", "torch") else [None]:
                for copied in (False, True) if library.accelerator else (False,):
                    with threadpool_limits(limit):  # of torch too; None leaves them as they are
                        timing = time_of(problem, library, inputs, reference, copied)
                    threads_used = f", {limit} thread{'s' if limit > 1 else ''}" if limit else ""
                    yield Measurement(
                        size=size,
                        label=f"{library.name}{threads_used}{', copy counted' if copied else ''}",
                        timing=timing,
                        threads=limit,
                        accelerator=library.accelerator,
                        copied=copied,
                    )


def time_of(
    problem: Problem, library: Library, inputs: tuple[np.ndarray, ...], reference: np.ndarray, copied: bool
) -> Timing:
    """Check one result, then time the computation."""
    there = tuple(library.put(array) for array in inputs)

    def run() -> Any:  # noqa: ANN401
        arrays = tuple(library.put(array) for array in inputs) if copied else there
        return library.wait(problem.compute(library.xp, *arrays))

    result = library.fetch(run())  # this first call is also the warm-up
    error = np.linalg.norm(np.ravel(result - reference)) / np.linalg.norm(np.ravel(reference))
    # Written in this way, NaN is wrong too.
    assert result.shape == reference.shape and error <= TOLERANCE, f"{library.name}: {problem.title}: error {error:.1e}"
    return measure(run, SECONDS)


def fastest(measured: list[Measurement]) -> Measurement:
    """Return the fastest of them."""
    return min(measured, key=lambda one: one.timing.seconds)


def clearly_faster(one: Measurement, other: Measurement) -> bool:
    """Whether one takes less than 90 % of the other's time, and their ranges do not overlap."""
    return one.timing.seconds < CLEAR_LEAD * other.timing.seconds and one.ends[1] < other.ends[0]


def pays_at(measured: list[Measurement], of_interest: Callable[[Measurement], bool]) -> str:
    """Return the sizes at which those of interest are clearly faster than every single CPU thread."""
    found = []
    for size in sorted({one.size for one in measured}):
        here = [one for one in measured if one.size == size]
        interesting = [one for one in here if of_interest(one)]
        if interesting and clearly_faster(fastest(interesting), fastest([one for one in here if one.threads == 1])):
            found.append(f"{size:,}")
    return ", ".join(found) or "none"


def row_of(problem: Problem, measured: list[Measurement]) -> list[results.Cell]:
    """Return what follows from the measurements of a problem: its row of the table."""

    def of_fastest(size: int) -> str:
        best = fastest([one for one in measured if one.size == size and not one.copied])
        seconds = best.timing.seconds
        factor, unit = (1, "s") if seconds > 1 else (1e3, "ms") if seconds > 1e-3 else (1e6, "µs")
        time = f"{factor * seconds:.3g} {unit} ± {best.timing.spread / 2 / seconds:.0%}"
        return f"{size:,} {problem.unit}: {best.label}, {time}"

    sizes = [one.size for one in measured]
    row: list[results.Cell] = [problem.title, of_fastest(min(sizes)), of_fastest(max(sizes))]
    row.append(pays_at(measured, lambda one: (one.threads or 0) > 1))
    if any(one.accelerator for one in measured):
        row.append(pays_at(measured, lambda one: one.accelerator and not one.copied))
        row.append(pays_at(measured, lambda one: one.copied))
    return row


def main() -> None:
    """Measure all problems, or those that are named; store the table and the plot."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--problem", action="append", choices=PROBLEMS, help="may be given more than once (default: all)"
    )
    parser.add_argument("--quick", choices=("true", "false"), default="false", help="without the largest size of each")
    arguments = parser.parse_args()
    names, found = arguments.problem or list(PROBLEMS), libraries()
    print("measured with:", ", ".join(library.name for library in found))
    if (share := cpu_share()) < 0.8:
        warn(
            f"this process gets only {share:.0%} of its CPUs' time, because others compute here too: times are too long"
        )
    figure = Figure(figsize=(16, 4 * math.ceil(len(names) / 4)), layout="constrained")
    axes = figure.subplots(math.ceil(len(names) / 4), 4, squeeze=False).flat
    rows, columns = [], ["problem", "fastest at the smallest size", "fastest at the largest size"]
    for axis, name in zip(axes, names, strict=False):
        measured = list(sweep(PROBLEMS[name], arguments.quick == "true", found))
        rows.append(row_of(PROBLEMS[name], measured))
        print(*rows[-1], sep="; ", flush=True)
        for label in dict.fromkeys(one.label for one in measured):
            line = [one for one in measured if one.label == label]
            axis.loglog([one.size for one in line], [one.timing.seconds for one in line], marker=".", label=label)
        axis.set(title=PROBLEMS[name].title, xlabel=PROBLEMS[name].unit, ylabel="seconds")
        axis.legend(fontsize=7)
    columns.append("more than one thread pays at")
    if any(library.accelerator for library in found):
        columns += ["the accelerator pays at", "and with the copy of the inputs at"]
    results.store(
        "cpu_or_gpu",
        title="Which is fastest, by size of the problem",
        columns=columns,
        rows=rows,
        spread="median of three or more repeats ± half of their interquartile range",
        figure=figure,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
