"""Does a large batch still learn as well? The same data with batches of 64 to 2048, several seeds each.

    python experiments/large_batches.py batches --seeds 1 --limit_train 2560    # minutes, to see how it works
    python experiments/large_batches.py batches                                 # the study: hours on two CPUs
    python experiments/large_batches.py higher_rate                             # batch 64 with higher learning rates

You should see that with eight times the batch and nothing else changed, a run learns much less in the same number of
epochs. A higher learning rate alone does not fix that; together with a longer schedule it does.
"""

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lab import results
from lab.flags import Parser
from lab.launching import load_script, train
from lab.plots import panels
from workshop.config import load_config
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
COMMON = ("--config", "../configs/cifar10.yaml", "--config", "../configs/cifar10_convergence.yaml")
SMALL, NAIVE, SQRT, LONG = "cifar10_b64", "cifar10_b512_naive", "cifar10_b512_sqrt", "cifar10_b512_sqrt_long"
LARGEST = "cifar10_b2048_sqrt_long"
OVERLAYS = {
    SMALL: ("batch 64", "black"),
    NAIVE: ("512, nothing else changed", "tab:red"),
    SQRT: ("512, higher learning rate (sqrt)", "tab:orange"),
    "cifar10_b256_sqrt_long": ("256, sqrt and 1.6x the epochs", "tab:green"),
    LONG: ("512, sqrt and 3x the epochs", "tab:blue"),
    LARGEST: ("2048, sqrt and 12x the epochs", "tab:purple"),
}
"""files in configs/, and what the plots call and color them"""
IMAGES = 10_000
"""of the study"""
FEWER_SEEDS = 3
"""for the largest batch, which takes long"""
PLOTS = {
    "large_batches": ((SMALL, NAIVE, SQRT, LONG), ("epochs", "training steps")),
    "many_batches": ((SMALL, "cifar10_b256_sqrt_long", LONG, LARGEST), ("training steps", "samples")),
}
"""the runs in each plot, and what its panels have on the horizontal axis"""
Curve = dict[str, Any]


def curve_of(overlay: str, seed: int, limit_train: int) -> Curve:
    """Train with an overlay; return batch, steps, losses by epoch. Seed 1 renews an example log, if there is one."""
    flags = (*COMMON, "--config", f"../configs/{overlay}.yaml", "--seed", seed, "--limit_train", limit_train)
    with tempfile.TemporaryDirectory() as folder:
        summary = train(LESSON, *flags, keep="events.out.tfevents.*", keep_in=Path(folder), on_cpu=True)
        example = results.RESULTS / "example_logs" / overlay / "events.out.tfevents.0.example"
        if seed == 1 and limit_train == IMAGES and example.parent.is_dir():
            shutil.copy(next(Path(folder).iterdir()), example)  # its own name contains that of this machine
    batch = summary["global_batch_size"]
    per_epoch = -(-limit_train // batch)
    losses = [epoch["val_loss"] for epoch in summary["epochs"]]
    return {"batch": batch, "steps": [per_epoch * (number + 1) for number in range(len(losses))], "losses": losses}


def peak_lr(overlay: str) -> float:
    """Return the largest learning rate of a run."""
    script = load_script(LESSON)
    files = [word.replace("..", str(LESSON.parent)) for word in (*COMMON, "--config", f"../configs/{overlay}.yaml")]
    config = load_config(script.Config, files)
    batch = config.global_batch_size or config.batch_size
    return config.lr * max(
        script.lr_factor(config, global_batch_size=batch, step=step, total_steps=1000) for step in range(1000)
    )


def steps_to(curve: Curve, target: float) -> int | None:
    """Return the steps after the first epoch with a loss of at most ``target``; None if there is none."""
    return next((step for step, loss in zip(curve["steps"], curve["losses"], strict=True) if loss <= target), None)


def plot(curves: dict[str, list[Curve]], names: tuple[str, ...], units: tuple[str, ...]) -> Any:  # noqa: ANN401
    """Return a plot of validation losses: medians over the seeds as lines, the range as a band."""
    figure, axes = panels(len(units), (11, 4.6), sharey=True)
    for axis, unit in zip(axes, units, strict=True):
        for name in names:
            first, (label, color) = curves[name][0], OVERLAYS[name]
            losses = list(zip(*(curve["losses"] for curve in curves[name]), strict=True))
            x = {
                "epochs": list(range(1, len(losses) + 1)),
                "training steps": first["steps"],
                "samples": [step * first["batch"] for step in first["steps"]],
            }[unit]
            text = f"{label} ({len(curves[name])} seeds)"
            axis.plot(x, [statistics.median(found) for found in losses], color=color, marker=".", label=text)
            axis.fill_between(
                x, [min(found) for found in losses], [max(found) for found in losses], color=color, alpha=0.13
            )
        axis.set(title=f"by {unit}", xlabel=unit, ylim=(0, 2.4))
        axis.set_xlim(left=0)
    axes[0].set_ylabel("validation loss")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Lines: median over the seeds. Bands: from the lowest to the highest seed.", fontsize=11)
    return figure


def batches(seeds: int, limit_train: int) -> None:
    """Train all overlays with all seeds; store the tables and plots after each seed."""
    curves: dict[str, list[Curve]] = {name: [] for name in OVERLAYS}
    for seed in range(1, seeds + 1):
        for name in OVERLAYS:
            if name != LARGEST or seed <= FEWER_SEEDS:
                curves[name].append(curve_of(name, seed, limit_train))
        store(curves, finished=seed == seeds)


def store(curves: dict[str, list[Curve]], *, finished: bool) -> None:
    """Store the table of all runs, the comparison seed by seed, and the plots."""
    finals = {name: [curve["losses"][-1] for curve in found] for name, found in curves.items()}
    rows: list[list[results.Cell]] = []
    for name, found in curves.items():
        reached = [steps_to(curve, target) for curve, target in zip(found, finals[SMALL], strict=False)]
        steps = [count for count in reached if count is not None]
        rows.append(
            [
                f"`{name}`",
                peak_lr(name),
                len(found[0]["losses"]),
                found[0]["steps"][-1],
                statistics.median(finals[name]),
                f"{min(finals[name]):.3f} to {max(finals[name]):.3f}",
                f"{len(steps)} of {len(found)}",
                statistics.median(steps) if steps else None,
            ]
        )
    columns = ["overlay", "peak lr", "epochs", "steps", "median final loss", "range", "as low as 64", "after steps"]
    formats = {"peak lr": ".3f", "steps": ",", "median final loss": ".3f", "after steps": ",.0f"}
    results.store("batches", title="Batch and schedule", columns=columns, rows=rows, formats=formats, finished=finished)
    small, naive, sqrt, long = (finals[name] for name in (SMALL, NAIVE, SQRT, LONG))
    comparisons: dict[str, list[bool]] = {
        "naive 512 ends higher than 64": [b > a for a, b in zip(small, naive, strict=True)],
        "sqrt 512 ends lower than naive 512": [b < a for a, b in zip(naive, sqrt, strict=True)],
        "sqrt_long 512 ends as low as 64": [b <= a for a, b in zip(small, long, strict=True)],
    }
    results.store(
        "batches_by_seed",
        title="Comparison of the final losses, seed by seed",
        columns=["comparison", "seeds", "of"],
        rows=[[name, sum(found), len(found)] for name, found in comparisons.items()],
        spread="final validation losses of runs with the same seed",
    )
    results.store(
        "batches_same_seeds",
        title="Batch 512 with the seeds of batch 2048",
        columns=["overlay", "median final loss"],
        rows=[[LONG, statistics.median(long[: len(finals[LARGEST])])]],
        formats={"median final loss": ".3f"},
    )
    for name, (shown, units) in PLOTS.items():
        results.store_plot(name, plot(curves, shown, units))


def higher_rate(limit_train: int) -> None:
    """Train with a batch of 64 with its learning rate, with 2.8 and with 8 times as much."""
    rows: list[list[results.Cell]] = []
    for lr in (0.004, 0.0112, 0.032):
        flags = (*COMMON, "--config", f"../configs/{SMALL}.yaml", "--limit_train", limit_train)
        rows.append([f"{lr:g}", train(LESSON, *flags, "--lr", lr, on_cpu=True)["epochs"][-1]["val_loss"]])
    results.store(
        "higher_rate",
        title="Batch 64 with higher learning rates",
        columns=["learning rate", "validation loss"],
        rows=rows,
        formats={"validation loss": ".3f"},
        spread="one seed",
    )


def main() -> None:
    """Run the study that is named on the command line."""
    parser = Parser(__doc__)
    parser.add_argument("study", choices=("batches", "higher_rate"))
    parser.add_argument("--seeds", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--limit_train", type=int, default=IMAGES, help="training images (default: 10,000)")
    arguments = parser.parse_args()
    if arguments.study == "batches":
        batches(arguments.seeds, arguments.limit_train)
    else:
        higher_rate(arguments.limit_train)


if __name__ == "__main__":
    run_reporting_user_errors(main)
