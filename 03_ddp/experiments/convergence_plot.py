"""The convergence figure: the same runs against epochs, against seconds of training and against steps."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from convergence_curves import Curve, target_of

COLOURS = ("black", "tab:red", "tab:orange", "tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:pink")


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Draw the validation loss of all runs into a PNG, in three panels; a ring marks where one reaches the target."""
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
                ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
                axis.plot(x[epoch - 1], curve.val_loss[epoch - 1], color=colour, **ring)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(curves)), frameon=False)
    first = curves[0].name
    figure.suptitle(f"Dotted: where {first} ends. A ring: the first epoch that is as low.", fontsize=12)
    figure.savefig(file, dpi=110)
