"""Run commands of the pages and keep what they made, for the pages to show: `python lab/example_figures.py [NAME ...]`.

    job     the log of lesson 01's job file; it needs a Slurm, such as that of slurm/local_cluster.sh
    trace   the plot trace.png that --trace true leaves, of lesson 01 with two workers
    nbody   a slice of the generated validation box, and what lesson 04's tiny U-Net makes of it

The plots are in results, the log in results/example_output, and in results/example_figures.json is how they were made.
"""

import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from lab.example_output import FOLDER, printed_by
from workshop.paths import REPOSITORY, default_data_dir

if TYPE_CHECKING:
    import torch

RESULTS = REPOSITORY / "results"
ABOUT = RESULTS / "example_figures.json"
JOB_LOG = FOLDER / "01_single_gpu_job.txt"
TRACE = RESULTS / "example_trace.png"
NBODY = RESULTS / "nbody_slice.png"
COMMANDS = {
    "job": ("01_single_gpu", "sbatch job.slurm --limit_train 12800 --limit_val 2000"),
    "trace": (
        "01_single_gpu",
        "python train.py --config ../configs/cifar10.yaml --epochs 1 --limit_train 3200 --limit_val 128 "
        "--num_workers 2 --trace true",
    ),
    "nbody": (
        "04_mixed_precision",
        "python train.py --config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml --epochs 1",
    ),
}
"""in which folder what is typed; --run_dir is added to the last two"""


def train(name: str, run_dir: Path) -> dict[str, Any]:
    """Run a command and return its summary.json."""
    lesson, command = COMMANDS[name]
    words = [sys.executable, *command.split()[1:], "--run_dir", str(run_dir)]
    subprocess.run(words, cwd=REPOSITORY / lesson, check=True)
    return json.loads((run_dir / "summary.json").read_text())


def keep_job(_: Path) -> dict[str, Any]:
    """Keep the log of a job."""
    lesson, command = COMMANDS["job"]
    JOB_LOG.write_text(f"$ {command}\n{printed_by(command, REPOSITORY / lesson)}\n")
    return {}


def keep_trace(run_dir: Path) -> dict[str, Any]:
    """Keep the plot of a traced run."""
    train("trace", run_dir)
    shutil.copy(run_dir / "trace.png", TRACE)
    return {}


def keep_nbody(run_dir: Path) -> dict[str, Any]:
    """Train the tiny U-Net, let it predict the gas of the validation box, and draw a slice."""
    import torch  # here, for the same reason as in `main`

    from workshop.datasets import nbody
    from workshop.models.unet3d import UNet3D

    summary = train("nbody", run_dir)
    model = UNet3D(summary["config"]["unet_width"], summary["config"]["unet_depth"])
    model.load_state_dict(torch.load(run_dir / "checkpoint.pt")["model"])
    matter, gas = nbody.arrays(default_data_dir(), "val")
    with torch.inference_mode():
        predicted = model(matter[None])[0]
    draw_nbody(matter, gas, predicted, NBODY)
    return {
        "cells": matter.shape[-1],
        "val_loss": summary["epochs"][-1]["val_loss"],
        "error": (gas - predicted).abs().mean(dim=(1, 2, 3)).tolist(),
        "error_of_identity": (gas[:4] - matter).abs().mean(dim=(1, 2, 3)).tolist(),
    }


def draw_nbody(matter: "torch.Tensor", gas: "torch.Tensor", predicted: "torch.Tensor", file: Path) -> None:
    """Draw the middle slice of three volumes: (4, n, n, n), (5, n, n, n) and (5, n, n, n), into a PNG.

    Densities and temperatures are contrasts. They are drawn as the ratio to the reference, on a logarithmic scale.
    """
    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
    middle = gas.shape[1] // 2
    rows: list[tuple[str, list[tuple[str, torch.Tensor]], str]] = [
        (
            "inferno",
            [("input: dark matter", matter[0]), ("target: gas", gas[0]), ("prediction", predicted[0])],
            "log10 of density / mean",
        ),
        (
            "viridis",
            [("target: temperature", gas[4]), ("prediction", predicted[4])],
            "log10 of temperature / reference",
        ),
    ]
    grid = figure.add_gridspec(2, 3)
    for number, (colours, panels, label) in enumerate(rows):
        ratios = [(volume[middle] + 1).clamp_min(0.05).log10().numpy() for _, volume in panels]
        low, high = _most(ratios[-2])  # of the target, for all of the row
        axes = [figure.add_subplot(grid[number, 3 - len(panels) + place]) for place in range(len(panels))]
        for axis, (title, _), ratio in zip(axes, panels, ratios, strict=True):
            shown = axis.imshow(ratio, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
            axis.set(xticks=(), yticks=())
            axis.set_title(title, fontsize=11)
        figure.colorbar(shown, ax=axes, label=label, aspect=15)
    velocity = matter[2, middle].numpy()
    limit = max(map(abs, _most(velocity)))
    axis = figure.add_subplot(grid[1, 0])
    shown = axis.imshow(velocity, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axis.set(xticks=(), yticks=())
    axis.set_title("input: velocity of dark matter", fontsize=11)
    figure.colorbar(shown, ax=axis, label="100 km/s", location="bottom", aspect=30)
    figure.savefig(file)


def _most(values: Any) -> tuple[float, float]:  # noqa: ANN401, an array of numpy
    """Return limits between which 99 % of the values are: a few extreme ones shall not decide about the colours."""
    import numpy as np

    low, high = np.quantile(values, [0.005, 0.995])
    return float(low), float(high)


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {"job": keep_job, "trace": keep_trace, "nbody": keep_nbody}


def main() -> None:
    """Make what is named on the command line, or all, and note how."""
    from lab.machine_facts import this_machine  # here, because it imports torch, and rendering the pages needs none

    for name in sys.argv[1:] or MAKERS:
        with tempfile.TemporaryDirectory() as folder:
            found = MAKERS[name](Path(folder, "run"))
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": f"python lab/example_figures.py {name}",
            "hardware": this_machine()["hardware"],
            "versions": this_machine()["versions"],
        }
        known = json.loads(ABOUT.read_text()) if ABOUT.exists() else {}
        ABOUT.write_text(json.dumps(known | {name: about | found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
