"""Tracing runs of a lesson with different flags, and plotting for each of them the run that was disturbed least."""

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.launching import reason
from workshop.errors import UserError
from workshop.profiling.timeline import plot_traces


def trace(start: Sequence[str], lesson: Path, flags: Sequence[object], folder: Path) -> Path:
    """Trace some steps of a lesson's script on CIFAR-10 into ``folder``; return the trace of rank 0.

    Raises:
        UserError: it failed.
    """
    common = ["--config", "../configs/cifar10.yaml", "--epochs", 1, "--trace", "true"]
    words = [*start, *map(str, [*common, *flags, "--run_dir", folder])]
    result = subprocess.run(words, cwd=lesson, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr) or f"exit status {result.returncode} from: {shlex.join(words)}")
    return folder / "rank0.pt.trace.json.gz"


def quietest_runs(
    start: Sequence[str],
    lesson: Path,
    configurations: Mapping[str, Sequence[object]],
    rounds: int,
    figures_of: Callable[[Path], dict[str, float]],
    key: str,
    plot: Path,
    caption: str = "",
) -> dict[str, dict[str, float]]:
    """Trace all configurations alternately; plot the run of each that other work disturbed least; return its figures.

    Args:
        start: the words that start Python, as one process or as ranks, and its script.
        lesson: the folder in which to start it.
        configurations: flags by title.
        rounds: runs of each.
        figures_of: returns the figures of a trace.
        key: the figure that is smallest in the least disturbed run.
        plot: the PNG to write.
        caption: what the title of a panel says about this figure, as a format string; "" to say nothing.

    Raises:
        UserError: a run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        traces: dict[str, list[Path]] = {title: [] for title in configurations}
        for number in range(rounds):
            for place, (title, flags) in enumerate(configurations.items()):
                traces[title].append(trace(start, lesson, flags, Path(folder, f"{place}_{number}")))
        best = {title: min(found, key=lambda file: figures_of(file)[key]) for title, found in traces.items()}
        figures = {title: figures_of(file) for title, file in best.items()}
        said = {
            title: f"{title}: {caption.format(found[key])}" if caption else title for title, found in figures.items()
        }
        plot_traces({said[title]: file for title, file in best.items()}).savefig(plot)
        return figures
