"""Draw the figure of the front page from the figures in results/: `python lab/render_front.py`.

Two changes of lesson 01, each before and after: how long a step waits for its data, and how long the rest of it takes.
"""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.render import RESULTS, load

FIGURE = RESULTS / "front.png"
PANELS = {
    "Change the loader": (
        "small colour images, 128 per step",
        128,
        {"CIFAR-10, map": "one image at a time", "CIFAR-10, memory": "a whole batch at a time"},
    ),
    "Change the number of workers": (
        "digits from a slow file system, 64 per step",
        64,
        {
            "slow files, 0 workers": "0 workers",
            "slow files, 1 worker": "1 worker",
            "slow files, 4 workers": "4 workers",
        },
    ),
}
"""title: what is trained on, samples per step, and the configurations with what the figure calls them"""


def milliseconds(row: dict[str, Any], batch_size: int) -> list[tuple[float, float]]:
    """Return the milliseconds that a step waited for data, and those of the rest of the step, in each trial."""
    found = []
    for trial in row["trials"]:
        step = 1000 * batch_size / trial["samples_per_second"]
        found.append((step * trial["for_percent"] / 100, step * (1 - trial["for_percent"] / 100)))
    return found


def gain(title: str, results: dict[str, Any]) -> float:
    """Return how many times as fast the last configuration of a panel is as its first one: median over the trials."""
    cases = list(PANELS[title][2])
    first, last = (results["rows"][case]["trials"] for case in (cases[0], cases[-1]))
    pairs = zip(first, last, strict=True)
    return statistics.median(after["samples_per_second"] / before["samples_per_second"] for before, after in pairs)


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw both panels into a PNG."""
    figure = Figure(figsize=(11, 3.2), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (title, (what, batch_size, cases)) in zip(panels, PANELS.items(), strict=True):
        for place, case in enumerate(cases):
            trials = milliseconds(results["rows"][case], batch_size)
            load_ms, rest_ms = (statistics.median(column) for column in zip(*trials, strict=True))
            totals = sorted(sum(trial) for trial in trials)
            around = [[load_ms + rest_ms - totals[0]], [totals[-1] - load_ms - rest_ms]]
            around = [[max(0.0, value) for value in side] for side in around]
            first = place == 0
            axes.barh(place, load_ms, color="#E69F00", label="waits for data" if first else None)
            axes.barh(place, rest_ms, left=load_ms, color="#0072B2", label="trains" if first else None)
            axes.errorbar(load_ms + rest_ms, place, xerr=around, color="black", capsize=3)
        axes.set_yticks(range(len(cases)), list(cases.values()), fontsize=11)
        axes.invert_yaxis()
        axes.set(xlim=(0, None), xlabel="milliseconds per training step")
        axes.set_title(f"{title}\n{what}", fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(loc="lower right", fontsize=10, frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    draw(load("first_changes"), FIGURE)
