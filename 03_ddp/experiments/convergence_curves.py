"""What several runs on the same data say when they are laid side by side: how low each gets, and what it costs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

from lab.launching import load_script
from lab.tables import format_table
from workshop.errors import UserError

LESSON = Path(__file__).resolve().parent.parent
COLOURS = ("black", "tab:red", "tab:orange", "tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:pink")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training run, epoch by epoch."""

    name: str
    """of its overlay and its folder"""
    global_batch_size: int
    world_size: int
    seed: int
    peak_lr: float
    """the largest learning rate of its schedule"""
    epochs: int
    steps: list[int]
    """(epochs,) training steps done by the end of each epoch"""
    seconds: list[float]
    """(epochs,) seconds of training by then, without validation"""
    val_loss: list[float]
    """(epochs,)"""

    def epoch_at(self, target: float) -> int | None:
        """Return the first epoch, counted from 1, whose validation loss is at most ``target``; None if none is."""
        return next((epoch for epoch, loss in enumerate(self.val_loss, start=1) if loss <= target), None)


def read_curves(folders: list[Path]) -> list[Curve]:
    """Read the runs whose results lie in ``folders``; they have the folders' names.

    Raises:
        UserError: one of them is missing or stopped early, or they cannot be compared, as they had not the same data.
    """
    summaries = [_read_summary(folder / "summary.json") for folder in folders]
    for key in ("dataset", "limit_train", "limit_val"):
        values = {folder.name: summary["config"][key] for folder, summary in zip(folders, summaries, strict=True)}
        if len(set(values.values())) > 1:
            differ = ", ".join(f"{name}: {value}" for name, value in values.items())
            raise UserError(f"these runs cannot be compared, --{key} differs ({differ}); train them with the same")
    return [curve_of(folder.name, summary) for folder, summary in zip(folders, summaries, strict=True)]


def _read_summary(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; train first, without --train false") from None


def curve_of(name: str, summary: dict[str, Any]) -> Curve:
    """Return the curve of a run from its ``summary.json``.

    Raises:
        UserError: the run stopped before its last epoch, so its learning rate never came down.
    """
    config, epochs = summary["config"], summary["epochs"]
    if len(epochs) < config["epochs"]:
        raise UserError(f"{name} stopped after {len(epochs)} of {config['epochs']} epochs; train it to the end")
    batch = summary["global_batch_size"]
    samples = round(epochs[0]["samples_per_second"] * epochs[0]["seconds"])
    steps = [epoch["epoch"] * math.ceil(samples / batch) for epoch in epochs]
    lr_factor = load_script(LESSON).lr_factor  # the schedule that the run had
    peak = lr_factor(SimpleNamespace(**config), batch, int(config["warmup"] * steps[-1]), steps[-1])
    return Curve(
        name=name,
        global_batch_size=batch,
        world_size=summary["world_size"],
        seed=config["seed"],
        peak_lr=config["lr"] * peak,
        epochs=len(epochs),
        steps=steps,
        seconds=list(accumulate(epoch["seconds"] for epoch in epochs)),
        val_loss=[epoch["val_loss"] for epoch in epochs],
    )


def target_of(curves: list[Curve]) -> float:
    """Return the validation loss to reach: the one that the first run, the baseline, ends at."""
    return curves[0].val_loss[-1]


def curves_table(curves: list[Curve]) -> str:
    """Return the runs as a table; its last columns are the time-to-solution, in steps and in seconds of training."""
    target = target_of(curves)
    header = ["run", "batch", "peak lr", "epochs", "steps", "final loss", "best loss", "seconds"]
    rows = []
    for curve in curves:
        epoch = curve.epoch_at(target)
        there = (f"{curve.steps[epoch - 1]:,}", f"{curve.seconds[epoch - 1]:.1f}") if epoch else ("never", "")
        rows.append(
            [
                curve.name,
                str(curve.global_batch_size),
                f"{curve.peak_lr:.2g}",
                str(curve.epochs),
                f"{curve.steps[-1]:,}",
                f"{curve.val_loss[-1]:.3f}",
                f"{min(curve.val_loss):.3f}",
                f"{curve.seconds[-1]:.1f}",
                *there,
            ]
        )
    return format_table([*header, f"steps to {target:.3f}", "seconds to it"], rows)


def conclude(curves: list[Curve]) -> list[str]:
    """Return what became of each run but the first, measured by the first: one sentence each."""
    baseline = curves[0]
    return [_compare(curve, baseline) for curve in curves[1:]]


def _compare(curve: Curve, baseline: Curve) -> str:
    target, final = target_of([baseline]), curve.val_loss[-1]
    if final <= target:
        result = f"ends at a validation loss of {final:.3f}, as low as {baseline.name} ({target:.3f}) or lower"
    else:
        result = f"ends at a validation loss of {final:.3f}, above {baseline.name}'s {target:.3f}"
    epoch = curve.epoch_at(target)
    if epoch is None:
        return f"{curve.name} {result}, which it never reaches"
    return (
        f"{curve.name} {result}, and reaches that after {curve.steps[epoch - 1]:,} steps "
        f"({baseline.name}: {baseline.steps[-1]:,}) and {curve.seconds[epoch - 1]:.1f} s of training "
        f"({baseline.name}: {baseline.seconds[-1]:.1f} s)"
    )


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Draw the validation loss of all runs into a PNG, in three panels; a circle marks where one reaches the target."""
    target = target_of(list(curves))
    figure = Figure(figsize=(13, 5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    panels = [
        ("by epoch: what each sample is worth", "epochs", lambda curve: range(1, curve.epochs + 1)),
        ("by wall time: what it costs on this machine", "seconds of training", lambda curve: curve.seconds),
        ("by step: what it costs if steps take equally long", "training steps", lambda curve: curve.steps),
    ]
    for axis, (title, label, x_of) in zip(axes, panels, strict=True):
        axis.axhline(target, color="grey", linestyle=":", linewidth=1.2)
        for number, curve in enumerate(curves):
            colour, x = COLOURS[number % len(COLOURS)], x_of(curve)
            axis.plot(x, curve.val_loss, color=colour, marker=".", label=curve.name)
            if epoch := curve.epoch_at(target):
                circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
                axis.plot(x[epoch - 1], curve.val_loss[epoch - 1], color=colour, **circle)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(curves)), frameon=False)
    first = curves[0].name
    figure.suptitle(f"Dotted: where {first} ends. A circle: the first epoch that is as low.", fontsize=12)
    figure.savefig(file, dpi=110)
