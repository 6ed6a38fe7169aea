"""How many operations per second a device makes in matrix products: the rate that nothing else on it exceeds."""

import math
import time

import torch

from workshop.config import ComputeFlags
from workshop.measuring.timing import measure
from workshop.step.precision import AUTOCAST_DTYPES, set_switches

SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
"""rows and columns of the matrices whose fastest product is the peak, by device"""
TOO_LONG = 0.5
"""seconds: a product that would take longer is not tried, as on CPUs that only imitate a number format"""


LONG_ENOUGH = 0.01
"""seconds of products on a GPU, beside which starting them and waiting for them do not show"""


def matmul_tflops(shape: tuple[int, int, int], precision: str, device: torch.device, min_seconds: float = 0.2) -> float:
    """Return the 10^12 floating-point operations per second of a product (m, k) x (k, n), ``shape`` being (m, k, n).

    Args:
        shape: sizes.
        precision: as ``--precision``.
        device: where to compute.
        min_seconds: how long to repeat it; the median repeat counts.
    """
    m, k, n = shape
    set_switches(ComputeFlags(precision=precision))
    dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
    left = torch.randn(m, k, device=device).to(dtype)
    right = torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    calls = 1

    def run() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=out)
        synchronize(device)

    run()  # libraries are loaded, algorithms chosen
    if device.type == "cuda":
        started = time.perf_counter()
        run()
        calls = calls_per_wait(time.perf_counter() - started)
    return 2 * math.prod(shape) * calls / measure(run, min_seconds).seconds / 1e12


def calls_per_wait(seconds: float) -> int:
    """Return how many products that take ``seconds`` each are started on a GPU before the CPU waits for their end.

    Starting one and waiting take some 10 microseconds, which must not show. Large products take long enough by
    themselves: in float32 the largest one takes a fifth of a second, and twenty of them at a time took very long.
    """
    return min(20, max(1, round(LONG_ENOUGH / seconds)))


def matrix_peak(precision: str, device: torch.device) -> float:
    """Return the 10^12 operations per second of the fastest product of large square matrices."""
    best = 0.0
    for size in SIZES[device.type]:
        if best and 2e-12 * size**3 / best > TOO_LONG:
            break
        best = max(best, matmul_tflops((size, size, size), precision, device))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
