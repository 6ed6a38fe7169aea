"""Gradient underflow: why fp16 needs its loss scaled, and bf16 does not.

    python experiments/underflow.py
    python experiments/underflow.py --steps 2 --crop_size 32      # flags that are not listed here go to train.py

The U-Net (on a GPU the full one, on a CPU the tiny one) makes one backward pass in float32, and the gradients of the
outputs of all layers and of the weights are counted by their power of two. You should see that many are below what fp16
can hold, and that multiplying the loss, which multiplies all gradients, moves them to where it has digits; one can also
go too far. Then short trainings show what that means for the loss.
"""

import dataclasses
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from lab import results
from lab.flags import Parser
from lab.plots import COLORS, panels
from workload import LESSON, first_batches, first_model, read_workload, training_device, training_of
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors

EXPONENTS = range(-60, 17)
"""powers of two that are counted; the few gradients beyond count at the ends"""
SCALES = (-8, 0, 4, 8, 12, 16, 20, 24, 28, 32)
"""powers of two that the loss is multiplied by; 16 is what GradScaler begins with"""
LIMITS = {"fp16": (-25, -14, 16), "bf16": (-134, -126, 128)}
"""powers of two: what is below the first becomes zero, what is below the second loses digits, the third overflows"""
TRAININGS = {"fp32": 1.0, "fp16, loss times 2^-8": 2.0**-8, "fp16, not scaled": 1.0, "fp16, scaled": None}
"""what the loss is multiplied by, and the gradients are divided by again; None: the scaler finds out

The tiny U-Net's loss is a mean over 2^8 times fewer values than the full one's: times 2^-8, its gradients are as small.
"""


def histogram(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return, for each e of `EXPONENTS`, the share of gradients above zero that are from 2^e to below 2^(e+1).

    The gradients are those of one backward pass in float32: of the outputs of all layers, which mixed precision keeps
    in 16 bits, and of the weights.
    """
    counts = torch.zeros(len(EXPONENTS), dtype=torch.int64, device=inputs.device)

    def count(gradient: torch.Tensor) -> None:
        exponents = torch.frexp(gradient[gradient != 0]).exponent - 1
        places = exponents.clamp(EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]
        counts.add_(torch.bincount(places, minlength=len(EXPONENTS)))

    def count_of_outputs(_: nn.Module, __: Any, outputs: torch.Tensor) -> None:  # noqa: ANN401
        outputs.register_hook(count)

    layers = [module for module in model.modules() if not list(module.children())]
    handles = [layer.register_forward_hook(count_of_outputs) for layer in layers]
    LESSON.loss_function(model(inputs), targets).backward()
    for handle in handles:
        handle.remove()
    for weight in model.parameters():
        count(weight.grad)
    model.zero_grad()
    return (counts / counts.sum()).cpu()


def shares(found: torch.Tensor, scale: int, form: str) -> list[float]:
    """Return which shares of the gradients, times 2^``scale``, become zero, lose digits, and overflow in a format."""
    smallest, normal, largest = LIMITS[form]
    exponents = torch.tensor(EXPONENTS) + scale
    zero, coarse, over = exponents < smallest, (exponents >= smallest) & (exponents < normal), exponents >= largest
    return [found[chosen].sum().item() for chosen in (zero, coarse, over)]


def val_loss(config: Any, device: torch.device, steps: int, scale: float | None) -> float:  # noqa: ANN401
    """Train for some steps, the loss multiplied by ``scale`` throughout, and return the validation loss."""
    model = first_model(config, device).train()
    constant: dict[str, Any] = {"init_scale": scale, "growth_interval": 2**31 - 1} if scale else {}
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16", **constant)
    training = training_of(config, model, device, scaler)
    for inputs, targets in first_batches(config, device, steps):
        LESSON.train_step(config, training, inputs, targets)
    total, samples = 0.0, 0
    with torch.no_grad(), LESSON.autocast(config.precision, device):
        for inputs, targets in LESSON.make_loader(config, "val", training.ranks):
            total += LESSON.loss_function(model(inputs.to(device)), targets.to(device)).item() * len(targets)
            samples += len(targets)
    return total / samples


def plot(found: torch.Tensor) -> Figure:
    """Plot the gradients by magnitude, as they are and scaled, over what becomes of them in fp16."""
    figure, (axes,) = panels(1, (10, 4.2))
    smallest, normal, largest = LIMITS["fp16"]
    edges, percent, start = [*EXPONENTS, EXPONENTS[-1] + 1], 100 * found, 16
    seen = [exponent for exponent, share in zip(EXPONENTS, found, strict=True) if share > 1e-4]
    begin, end = min(*seen, -30) - 2, max(seen[-1] + start, largest) + 4
    axes.axvspan(begin, smallest, color=COLORS[3], alpha=0.18, label="fp16: becomes 0")
    axes.axvspan(smallest, normal, color=COLORS[1], alpha=0.18, label="fp16: loses digits")
    axes.axvspan(largest, end, color=COLORS[5], alpha=0.3, label="fp16: overflows")
    axes.stairs(percent, edges, fill=True, color=COLORS[0], alpha=0.8, label="gradients")
    axes.stairs(percent, [edge + start for edge in edges], color="black", label=f"gradients times $2^{{{start}}}$")
    axes.set(xlabel="magnitude of a gradient", ylabel="% of the gradients", xlim=(begin, end))
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    before, after = shares(found, 0, "fp16")[0], shares(found, start, "fp16")[0]
    axes.set_title(f"In fp16 {before:.1%} of the gradients become 0; {after:.1%} with the loss scaled")
    axes.legend(fontsize=9)
    return figure


def main() -> None:
    """Count the gradients of one batch, and store the table; then train, and store the losses."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each training (default: %(default)s)")
    arguments, more = parser.parse_known_args()
    require_positive(arguments, "steps")
    device = training_device()
    LESSON.set_precision("fp32", cudnn_benchmark=False)  # otherwise convolutions on a GPU would round to TF32
    config = read_workload(more)
    (batch,) = first_batches(config, device, steps=1)
    found = histogram(first_model(config, device), *batch)
    rows: list[list[results.Cell]]
    rows = [["fp16", f"2<sup>{scale}</sup>", *shares(found, scale, "fp16")] for scale in SCALES]
    results.store(
        "underflow",
        title="Gradients in 16 bits",
        columns=["format", "loss times", "become 0", "lose digits", "overflow"],
        rows=[*rows, ["bf16", "2<sup>0</sup>", *shares(found, 0, "bf16")]],
        formats=dict.fromkeys(("become 0", "lose digits", "overflow"), ".1%"),
        unit="share of the gradients",
        figure=plot(found),
    )
    losses: list[list[results.Cell]] = []
    for name, scale in TRAININGS.items():
        in_format = dataclasses.replace(config, precision=name.partition(",")[0])
        losses.append([name, val_loss(in_format, device, arguments.steps, scale)])
        results.store(
            "underflow_losses",
            title=f"Validation loss after {arguments.steps} steps",
            columns=["format and scale", "validation loss"],
            rows=losses,
            formats={"validation loss": ".4f"},
            spread="one run each",
            finished=len(losses) == len(TRAININGS),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
