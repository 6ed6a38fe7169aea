"""The tiny U-Net in each number format that a CPU has, and the identity baseline: `python experiments/unet3d.py`.

You should see that the formats end at the same loss, within some percent, and far below the identity baseline. That one
predicts that the gas is where the dark matter is, moves as it does, and has the same temperature everywhere.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from lab import results
from lab.flags import Parser
from lab.launching import load_script, train
from workshop.config import load_config
from workshop.errors import run_reporting_user_errors
from workshop.ranks import Ranks

LESSON = Path(__file__).resolve().parents[1]
TINY = ("--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml")


def identity_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error, (), of the identity baseline.

    Args:
        inputs: (N, 4, X, Y, Z), density and velocity of the dark matter.
        targets: (N, 5, X, Y, Z), density, velocity and temperature of the gas.
    """
    return F.l1_loss(torch.cat([inputs, torch.zeros_like(targets[:, 4:])], dim=1), targets)


def main() -> None:
    """Train in each format, and store the losses."""
    Parser(__doc__).parse_args()
    rows: list[list[results.Cell]] = []
    for precision in ("fp32", "bf16", "fp16"):
        epochs = train(LESSON, *TINY, "--precision", precision, on_cpu=True)["epochs"]
        loss = epochs[-1]["val_loss"]
        change = loss / rows[0][1] - 1 if rows else 0.0
        rows.append([f"`{precision}`", loss, change, sum(epoch["seconds"] for epoch in epochs)])
    script = load_script(LESSON)
    config = load_config(script.Config, [word.replace("..", str(LESSON.parent)) for word in TINY])
    batches = list(script.make_loader(config, "val", Ranks(device=torch.device("cpu"))))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows.append(["identity baseline", identity_loss(inputs, targets).item(), None, None])
    results.store(
        "unet3d",
        title="The tiny U-Net in each format",
        columns=["`--precision`", "validation loss", "against fp32", "training seconds"],
        rows=rows,
        formats={"validation loss": ".4f", "against fp32": "+.1%", "training seconds": ".0f"},
        spread="one run each",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
