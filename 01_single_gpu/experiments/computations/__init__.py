"""The computations that `cpu_or_gpu.py` measures: one file for each, with the sizes to try."""

from computations import branching, chained, elementwise, linear_systems, regression
from sweep import Sweep

EXPERIMENTS: dict[str, list[Sweep]] = {
    "linear_systems": linear_systems.SWEEPS,
    "elementwise": elementwise.SWEEPS,
    "branching": branching.SWEEPS,
    "chained": chained.SWEEPS,
    "regression": regression.SWEEPS,
}
