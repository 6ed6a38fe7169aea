"""Draw the figure of the front page from the figures in results/: `python lab/render_front.py`.

Two changes of lesson 01: one that pays, and one that does not. Bars are what loading alone and training alone take per
step; a black mark is what a step takes that does both.
"""

import math
from pathlib import Path

from matplotlib.figure import Figure

from lab.render import RESULTS
from lab.render_first import KINDS, alone, step_milliseconds

FIGURE = RESULTS / "front.png"
PANELS = {
    "A change that pays: the loader": (
        "cifar10",
        "small colour images, 128 per step",
        {"map, 0 workers": "one image at a time", "memory": "a whole batch at a time"},
    ),
    "One that does not: the number of workers": (
        "mnist",
        "handwritten digits and a larger network, 64 per step",
        {"0 workers": "0 workers", "1 worker": "1 worker", "2 workers": "2 workers"},
    ),
}
"""title: data set, what is trained on, and the configurations with what the figure calls them"""


def gain(title: str) -> float:
    """Return how many times as fast the last configuration of a panel is as its first one."""
    data_set, _, cases = PANELS[title]
    before, after = (step_milliseconds(case, data_set)[2] for case in (next(iter(cases)), next(reversed(cases))))
    return before / after


def largest_deviation_percent() -> int:
    """Return the largest standard deviation of what the figure shows, in percent of its mean, rounded up."""
    found = [alone(case)[kind] for _, _, cases in PANELS.values() for case in cases for kind in KINDS]
    return math.ceil(100 * max(one["std"] / one["mean"] for one in found))


def draw(file: Path) -> None:
    """Draw both panels into a PNG."""
    figure = Figure(figsize=(11, 3.2), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (title, (data_set, what, cases)) in zip(panels, PANELS.items(), strict=True):
        for place, case in enumerate(cases):
            load_ms, train_ms, both_ms = step_milliseconds(case, data_set)
            first = place == 0
            axes.barh(place, load_ms, color="#E69F00", label="loading alone" if first else None)
            axes.barh(place, train_ms, left=load_ms, color="#56B4E9", label="training alone" if first else None)
            label = "measured together" if first else None
            axes.plot([both_ms, both_ms], [place - 0.48, place + 0.48], color="black", linewidth=3, label=label)
        axes.set_yticks(range(len(cases)), list(cases.values()), fontsize=11)
        axes.set(ylim=(len(cases) - 0.4, -0.6), xlim=(0, None), xlabel="milliseconds per training step")
        axes.set_title(f"{title}\n{what}", fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10, frameon=False
    )
    figure.savefig(file)


if __name__ == "__main__":
    draw(FIGURE)
