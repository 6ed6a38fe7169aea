"""Plot the figure of the front page from the stored tables of a machine: `python experiments/front_figure.py MACHINE`.

Two changes of lesson 01: one that pays, and one that does not. Bars are what loading alone and training alone take per
step; a black mark is what a step takes that does both.
"""

from lab import results
from lab.flags import Parser
from lab.plots import panels
from workshop.errors import run_reporting_user_errors

PANELS = {
    "A change that pays: the loader\nsmall color images, 128 per step": (
        128,
        {"one image at a time": "loaders map, 0 workers", "a whole batch at a time": "loaders memory"},
    ),
    "One that does not: the number of workers\nhandwritten digits and a larger network, 64 per step": (
        64,
        {"0 workers": "worker_counts 0", "1 worker": "worker_counts 1", "2 workers": "worker_counts 2"},
    ),
}
"""samples per step, and the stored rows by what the figure calls them"""


def main() -> None:
    """Draw both panels into front.png beside the tables."""
    parser = Parser(__doc__)
    parser.add_argument("machine", help="a folder of results/")
    machine = parser.parse_args().machine
    figure, both = panels(2, (11, 3.2))
    for axes, (title, (batch_size, rows)) in zip(both, PANELS.items(), strict=True):
        for place, row in enumerate(rows.values()):
            rates = (results.value(f"{machine}/{row}.{kind}") for kind in ("IO", "SYNTHETIC", "FULL"))
            load, step, full = (1000 * batch_size / rate for rate in rates)
            labels = ("loading alone", "training alone", "measured together") if place == 0 else (None, None, None)
            axes.barh(place, load, color="#E69F00", label=labels[0])
            axes.barh(place, step, left=load, color="#56B4E9", label=labels[1])
            axes.plot([full, full], [place - 0.48, place + 0.48], color="black", linewidth=3, label=labels[2])
        axes.set_yticks(range(len(rows)), list(rows), fontsize=11)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, None), xlabel="milliseconds per training step")
        axes.set_title(title, fontsize=11, loc="left")
        axes.grid(visible=False)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    figure.savefig(results.RESULTS / machine / "front.png", dpi=110)


if __name__ == "__main__":
    run_reporting_user_errors(main)
