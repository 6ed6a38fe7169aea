"""Operations on whole arrays, each needing the one before.

Run one by one, each reads its arrays from memory and writes its result back. A compiler makes one loop of them, which
reads every number once and writes nothing but the total.
"""

import numpy as np

from backends import Array, Backend
from sweep import Inputs, Sweep


def draw(random: np.random.Generator, size: int) -> Inputs:
    """Draw x, y and z, (size,) each."""
    return tuple(random.random(size, dtype=np.float32) for _ in range(3))


def chain(x: Array, y: Array, z: Array) -> Array:
    """Return the total of three arrays, each of which depends on the one before; ()."""
    x = x + 3
    y = y + x
    z = z + y
    return (x + y + z).sum()


def run_chain(backend: Backend, x: Array, y: Array, z: Array) -> Array:
    """Run the chain: as one program where the backend compiles, else operation by operation."""
    return backend.compile(chain)(x, y, z)


SWEEPS = [
    Sweep(
        title="chain of four sums, then the total",
        unit="elements",
        draw=draw,
        compute=run_chain,
        reference=lambda x, y, z: (3 * (x + 3) + 2 * y + z).sum(),
        quick_sizes=tuple(10**i for i in range(2, 8)),
        full_sizes=tuple(10**i for i in range(2, 8)),
        threaded=("torch", "torch.compile"),
        compiled=True,
    )
]
