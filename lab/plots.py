"""Plots: panels without a frame, and time lines of traced runs."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.launching import train

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#999999")
"""of curves and bars, distinguishable with any kind of color vision"""


def panels(count: int, size: tuple[float, float], **how: Any) -> tuple[Figure, list[Any]]:  # noqa: ANN401
    """Return a figure of ``size`` inches, and its axes side by side, with a light grid; ``how`` as in ``subplots``."""
    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(1, count, squeeze=False, **how)[0]
    for axes in found:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(found)


def quietest_traces(
    lesson: Path,
    configurations: Mapping[str, Sequence[object]],
    rounds: int,
    figures_of: Callable[[Path], dict[str, float]],
    key: str,
    **how: Any,  # noqa: ANN401
) -> tuple[Figure, dict[str, dict[str, float]]]:
    """Trace all configurations alternately; plot the run of each that other work disturbed least.

    Args:
        lesson: the folder of the train script.
        configurations: flags by title.
        rounds: runs of each.
        figures_of: returns the figures of a trace, by name.
        key: the figure that is smallest in the least disturbed run.
        how: as in `lab.launching.train`.

    Returns: The time lines, and by title the figures of the runs that they show.
    """
    from workshop.profiling.timeline import plot_traces

    with tempfile.TemporaryDirectory() as folder:
        traces: dict[str, list[Path]] = {title: [] for title in configurations}
        for number in range(rounds):
            for place, (title, flags) in enumerate(configurations.items()):
                kept = Path(folder, f"{place}_{number}")
                kept.mkdir()
                train(lesson, *flags, "--epochs", 1, "--trace", "true", keep="rank0*.json.gz", keep_in=kept, **how)
                traces[title].append(next(kept.iterdir()))
        best = {title: min(found, key=lambda file: figures_of(file)[key]) for title, found in traces.items()}
        return plot_traces(best), {title: figures_of(file) for title, file in best.items()}
