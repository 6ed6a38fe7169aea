"""Plot the learning rate by step, as train.py computes it: `python experiments/learning_rates.py`."""

from pathlib import Path
from types import SimpleNamespace

from lab.flags import Parser
from lab.launching import load_script
from lab.plots import panels
from lab.results import RESULTS
from workshop.errors import run_reporting_user_errors

RUNS = (
    ("1 rank: 50 steps of 64", 1, "none", "k-"),
    ("2 ranks: 25 steps of 128, none", 2, "none", "b:"),
    ("2 ranks: 25 steps of 128, sqrt", 2, "sqrt", "b-"),
    ("2 ranks: 25 steps of 128, linear", 2, "linear", "b--"),
)


def main() -> None:
    """Draw results/drawings/learning_rates.png for 3,200 samples, for one rank and for two."""
    Parser(__doc__).parse_args()
    lr_factor = load_script(Path(__file__).resolve().parents[1]).lr_factor
    figure, (axis,) = panels(1, (8, 3.8))
    for label, ranks, scaling, style in RUNS:
        config = SimpleNamespace(base_batch_size=64, lr_scaling=scaling, warmup=0.2, warmup_steps=None, min_lr=0)
        steps = 3200 // (64 * ranks)
        factors = [
            lr_factor(config, global_batch_size=64 * ranks, step=step, total_steps=steps) for step in range(steps)
        ]
        axis.plot(range(1, steps + 1), factors, style, marker=".", label=label)
    axis.set(xlabel="training step", ylabel="learning rate, in units of --lr", ylim=(0, 2.1), xlim=(0, 51))
    axis.legend()
    figure.savefig(RESULTS / "drawings" / "learning_rates.png", dpi=110)


if __name__ == "__main__":
    run_reporting_user_errors(main)
