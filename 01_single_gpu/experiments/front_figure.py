"""Plot the figure of the front page from the stored tables of a machine: `python experiments/front_figure.py MACHINE`.

Two changes of lesson 01: one that pays, and one that does not. Bars are what loading alone and training alone take per
step; a black mark is what a step takes that does both.
"""

from lab import results
from lab.flags import Parser
from lab.plots import panels
from workshop.errors import run_reporting_user_errors
from workshop.profiling.bars import draw_bars

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
        kinds = ("IO", "SYNTHETIC", "FULL")
        rates = {label: [results.value(f"{machine}/{row}.{kind}") for kind in kinds] for label, row in rows.items()}
        draw_bars(axes, rates, batch_size)
        axes.set_title(title, fontsize=11, loc="left")
        axes.grid(visible=False)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    figure.savefig(results.RESULTS / machine / "front.png", dpi=110)


if __name__ == "__main__":
    run_reporting_user_errors(main)
