"""Add a constant to every element: no element waits for another, and there is next to nothing to compute.

What it takes is a launch, and then moving the numbers through memory: small arrays measure the first, large the second.
Every result is a new array. Large ones come fresh from the system, page by page, and that can take longer than the sum:
on Linux numpy asks for large pages by itself, torch only with THP_MEM_ALLOC_ENABLE=1 in the environment.
"""

import numpy as np

from backends import Array, Backend
from sweep import Inputs, Sweep


def draw(random: np.random.Generator, size: int) -> Inputs:
    """Draw x, (size,)."""
    return (random.random(size, dtype=np.float32),)


def add_constant(backend: Backend, x: Array) -> Array:
    """Return x + 3, (size,)."""
    return x + 3


SWEEPS = [
    Sweep(
        title="y = x + 3",
        unit="elements",
        draw=draw,
        compute=add_constant,
        reference=lambda x: x + 3,
        quick_sizes=tuple(10**i for i in range(2, 8)),
        full_sizes=tuple(10**i for i in range(2, 9)),
        threaded=("torch",),  # numpy adds on one thread
    )
]
