"""How exact a training step is in each number format, and how much memory it needs.

    python experiments/format_errors.py

One step of the U-Net (on a GPU the full one, on a CPU the tiny one): its outputs and the gradients of all weights are
compared with those in float64. You should see errors of the outputs that follow from the number of significant bits,
and memory that falls by less than half. What is not listed here goes to train.py, such as --batch_size 8.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from lab import results
from lab.allocations import peak_of, recorder, trace_events
from lab.flags import Parser
from workload import LESSON, first_batches, first_model, read_workload, training_device, training_of
from workshop.checks import choose_precision
from workshop.errors import UserError, run_reporting_user_errors

SAMPLES = 4
"""that are compared with float64; the step whose memory is measured has a whole batch"""


def outputs_and_gradients(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a batch and the gradients of all weights, as one long vector each, in float64."""
    scale = 2.0**16  # with fp16, as the scaler begins
    while True:
        model.zero_grad()
        with LESSON.autocast(precision, inputs.device):
            outputs = model(inputs)
            loss = LESSON.loss_function(outputs, targets)
        scale = scale if precision == "fp16" else 1.0
        (scale * loss).backward()
        gradients = torch.cat([weight.grad.double().flatten() / scale for weight in model.parameters()])
        if gradients.isfinite().all() or scale <= 1:
            return outputs.detach().double().flatten(), gradients
        scale /= 2  # as the scaler does after a step that overflows


def peak_bytes(config: Any, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> int:  # noqa: ANN401
    """Return the most bytes in tensors during a training step: weights, gradients, optimizer, batch, activations."""
    training = training_of(config, model, batch[0].device)
    optimizer = training.optimizer
    LESSON.train_step(config, training, *batch)  # the first step makes the optimizer's state
    optimizer.zero_grad()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    there_before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state, *batch))
    if batch[0].device.type == "cuda":
        of_others = torch.cuda.memory_allocated() - there_before  # such as the gradients in float64 to compare with
        torch.cuda.reset_peak_memory_stats()
        LESSON.train_step(config, training, *batch)
        return torch.cuda.max_memory_allocated() - of_others
    with recorder() as recorded:
        LESSON.train_step(config, training, *batch)
    return peak_of(trace_events(recorded), level=there_before)


def main() -> None:
    """Measure each format that the device has, and store the table."""
    _, more = Parser(__doc__).parse_known_args()
    device, config = training_device(), read_workload(more)
    batch = next(first_batches(config, device, steps=1))
    inputs, targets = (part[:SAMPLES] for part in batch)
    model = first_model(config, device)
    LESSON.set_precision("fp32", cudnn_benchmark=False)
    exact = targets.double() if targets.is_floating_point() else targets
    truth = outputs_and_gradients(copy.deepcopy(model).double(), inputs.double(), exact, "fp32")
    rows: list[list[results.Cell]] = []
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        try:
            choose_precision(precision, device)
        except UserError as error:
            print(f"{precision}: not measured: {error}")
            continue
        LESSON.set_precision(precision, cudnn_benchmark=False)
        found = outputs_and_gradients(copy.deepcopy(model), inputs, targets, precision)
        errors = [((mine - true).norm() / true.norm()).item() for mine, true in zip(found, truth, strict=True)]
        peak = peak_bytes(dataclasses.replace(config, precision=precision), copy.deepcopy(model), batch)
        rows.append([precision, *errors, peak / 1e6])
    results.store(
        "format_errors",
        title=f"A step of {config.model} in each format, compared with float64",
        columns=["", "error of outputs", "error of gradients", "peak MB"],
        rows=rows,
        formats={"error of outputs": ".0e", "error of gradients": ".0e", "peak MB": ",.1f"},
        spread=f"relative errors for {len(inputs)} samples",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
