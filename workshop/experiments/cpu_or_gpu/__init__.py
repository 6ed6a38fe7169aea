"""The computations that `01_single_gpu/cpu_or_gpu.py` measures: one file for each, with the sizes to try."""

from workshop.experiments.cpu_or_gpu import branching, chained, elementwise, linear_systems, regression
from workshop.experiments.sweep import Sweep

EXPERIMENTS: dict[str, list[Sweep]] = {
    "linear_systems": linear_systems.SWEEPS,
    "elementwise": elementwise.SWEEPS,
    "branching": branching.SWEEPS,
    "chained": chained.SWEEPS,
    "regression": regression.SWEEPS,
}
