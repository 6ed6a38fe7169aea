"""What the U-Net predicts: one slice of the dark matter, of the gas, and of the gas as a trained model predicts it.

    python experiments/see_prediction.py ../runs/baseline     # a run of train.py with --model unet3d that has finished

It cuts one cube out of the box for validation, which the training has never used, and applies the model of the run's
checkpoint to it in float32. You should see that the prediction has the structures of the gas but not its finest
details, and that its error is far below that of the identity baseline, which takes the dark matter for the gas.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from lab import results
from lab.flags import Parser
from workshop.datasets import nbody
from workshop.errors import UserError, run_reporting_user_errors
from workshop.models.unet3d import UNet3D
from workshop.paths import default_data_dir

LARGEST = 64
"""edge, in cells, of the largest cube: the full U-Net needs gigabytes for it on a CPU"""
DENSITY, TEMPERATURE = 0, 4
"""channels of the gas; the density of the dark matter is channel 0, too"""
PARTS: dict[str, slice] = {
    "all": slice(0, 5),
    "density": slice(0, 1),
    "velocity": slice(1, 4),
    "temperature": slice(4, 5),
}


def read_model(folder: Path) -> tuple[UNet3D, dict[str, Any]]:
    """Return the trained model of a run, on the CPU, and the flags of the run.

    Raises:
        UserError: the folder has no finished run of the U-Net.
    """
    try:
        config = json.loads((folder / "summary.json").read_text())["config"]
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name the folder of a run that has finished") from None
    if config["model"] != "unet3d":
        raise UserError(f"{folder} is a run of --model {config['model']}; this shows what --model unet3d predicts")
    model = UNet3D(config["unet_width"], config["unet_depth"])
    model.load_state_dict(checkpoint["model"])
    return model.eval(), config


def read_cube(data_dir: Path, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (4, n, n, n) and targets (5, n, n, n) of the first corner of the box for validation."""
    inputs, targets = nbody.arrays(data_dir, "val")
    edge = min(inputs.shape[-1], LARGEST) // 2**depth * 2**depth
    if not edge:
        raise UserError(f"{data_dir}: the box has {inputs.shape[-1]} cells a side, fewer than the model can halve")
    return inputs[:, :edge, :edge, :edge], targets[:, :edge, :edge, :edge]


def identity_baseline(inputs: torch.Tensor) -> torch.Tensor:
    """Return the gas (5, n, n, n) that has the density and the velocity of the dark matter, and one temperature."""
    return torch.cat([inputs, torch.zeros_like(inputs[:1])])


def plot(inputs: torch.Tensor, targets: torch.Tensor, predicted: torch.Tensor) -> Figure:
    """Draw the slice in the middle: densities above, temperatures below, each row with one scale of colors."""
    rows = (
        (
            ("dark matter: density (input)", inputs[DENSITY]),
            ("gas: density (target)", targets[DENSITY]),
            ("gas: density (prediction)", predicted[DENSITY]),
        ),
        (
            ("dark matter: velocity along the slice (input)", inputs[2]),
            ("gas: temperature (target)", targets[TEMPERATURE]),
            ("gas: temperature (prediction)", predicted[TEMPERATURE]),
        ),
    )
    figure, middle = Figure(figsize=(11, 7.4), layout="constrained"), inputs.shape[1] // 2
    for panels, row in zip(figure.subplots(2, 3), rows, strict=True):
        target = row[1][1][middle]
        low, high = (torch.quantile(target, share).item() for share in (0.01, 0.99))
        for axes, (title, volume) in zip(panels, row, strict=True):
            velocity = "velocity" in title
            limits: dict[str, float] = {} if velocity else {"vmin": low, "vmax": high}
            axes.imshow(volume[middle].numpy(), cmap="coolwarm" if velocity else "magma", **limits)
            axes.set_title(title, fontsize=10.5)
            axes.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    """Predict, compare with the identity baseline, and store the errors and the figure."""
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--data_dir", type=Path, default=default_data_dir(), metavar="DIR", help="folder of the data")
    arguments = parser.parse_args()
    model, config = read_model(arguments.run)
    inputs, targets = read_cube(arguments.data_dir, config["unet_depth"])
    with torch.inference_mode():
        predicted = model(inputs[None])[0]
    volumes = {"identity baseline": identity_baseline(inputs), "prediction": predicted}
    results.store(
        "unet_prediction",
        title=f"Mean absolute error in a cube of {inputs.shape[-1]}³ cells that the training has not used",
        columns=["what", *PARTS],
        rows=[
            [name, *(F.l1_loss(volume[part], targets[part]).item() for part in PARTS.values())]
            for name, volume in volumes.items()
        ],
        formats=dict.fromkeys(PARTS, ".4f"),
        spread=f"one run of {config['epochs']} epochs",
        figure=plot(inputs, targets, predicted),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
