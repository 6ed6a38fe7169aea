"""The precision ladder: what each option of lesson 04 costs and gives, all measured on the same work."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from workshop.step.graph import EAGER_STEPS
from workshop.step.optimizers import build_optimizer
from workshop.step.precision import require_options, set_switches

from matrix_peak import matrix_peak, synchronize
from tensor_memory import PeakOnCuda, peak_bytes_on_cpu
from trainer import Batch, Trainer, batches_of, errors_of, flops_per_sample, reference
from workload import FORMATS, MORE, WorkloadConfig
from workshop.config import ComputeFlags
from workshop.errors import UserError
from workshop.loaders import build_loaders
from workshop.models import build_model
from workshop.profiling.calibration import repeats_for

AS_PYTORCH_COMES = "fp32 as PyTorch comes"
"""the row for which nobody sets TF32: on NVIDIA GPUs convolutions round to it, and matrix products do not"""


def reset_switches(_: ComputeFlags) -> None:
    """Put torch's switches back to where they are when it is imported."""
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class Row:
    """What one set of options costs and gives; where the device lacks an option, only the note."""

    name: str
    note: str = ""
    samples_per_second: float | None = None
    samples_per_second_std: float | None = None
    peak_memory_bytes: int | None = None
    """in tensors: weights, gradients, optimizer, batch, and what a step needs on top"""
    tflops: float | None = None
    share_of_peak: float | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    val_loss: float | None = None


def row_options(
    config: WorkloadConfig, device: torch.device, compiled: bool = True
) -> Iterator[tuple[str, WorkloadConfig, str]]:
    """Yield name, configuration and what the device lacks ("" if nothing) of each row.

    First the number formats alone; then, on top of bf16, one option more in each row, leaving out what is not there.
    """
    for name, options in FORMATS.items():
        candidate = dataclasses.replace(config, **options)
        yield name, candidate, _lack(candidate, device)
        if name == "tf32":
            yield AS_PYTORCH_COMES, config, _lack(candidate, device) and "where there is no TF32, it is fp32"
    below = dataclasses.replace(config, **(FORMATS["fp32"] if _lack(candidate, device) else FORMATS["bf16"]))
    for name, options in MORE.items():
        candidate = dataclasses.replace(below, **options)
        skipped = name == "compile" and not compiled
        lack = "left out by --quick" if skipped else _lack(candidate, device)
        yield f"+ {name}", candidate, lack
        below = below if lack else candidate


def _lack(config: WorkloadConfig, device: torch.device) -> str:
    try:
        require_options(config, device)
        build_optimizer(config, nn.Linear(1, 1), config.fused, config.cuda_graph)
    except UserError as error:
        return str(error)
    return ""


def climb(
    config: WorkloadConfig, device: torch.device, steps: int, trials: int, seconds: float, compiled: bool = True
) -> dict[str, Any]:
    """Measure every rung; without ``compiled``, leave torch.compile out, which takes most of the time.

    Each starts from the same weights and is first compared with float64 on one batch. Then it trains on the same
    ``steps`` batches, is validated, and trains on one batch again and again for the throughput: all rows in turn,
    ``trials`` times for about ``seconds``, so that a machine that changes its pace does so to all of them.

    Returns:
        peaks (10^12 operations/s of a matrix product by precision), flops_per_sample, batch_size, steps, rows.
    """
    train_loader, val_loader = build_loaders(config, device)
    torch.manual_seed(config.seed)
    model = build_model(config).to(device)
    batch = tuple(part.to(device) for part in next(batches_of(train_loader, 1)))
    flops = flops_per_sample(config, batch)
    truth = reference(model, train_loader, *batch)
    peaks: dict[str, float] = {}
    rows: list[Row] = []
    trainers: dict[str, Trainer] = {}
    for name, options, lack in row_options(config, device, compiled):
        if lack:
            rows.append(Row(name, note=f"not available: {lack}"))
            continue
        print(f"  {name} ...", flush=True)
        if options.precision not in peaks:
            peaks[options.precision] = matrix_peak(options.precision, device)
        cuda_peak = PeakOnCuda(device) if device.type == "cuda" else None
        switches = reset_switches if name == AS_PYTORCH_COMES else set_switches
        trainer = trainers[name] = Trainer(options, model, train_loader, device, set_switches=switches)
        outputs, gradients = errors_of(trainer, batch, truth)
        if cuda_peak:
            cuda_peak.reset()  # comparing is no part of training
        trainer.train(batches_of(train_loader, steps))
        rows.append(
            Row(
                name,
                peak_memory_bytes=cuda_peak.bytes() if cuda_peak else _peak_on_cpu(trainer, batch),
                output_error=outputs,
                gradient_error=gradients,
                val_loss=trainer.validate(val_loader),
            )
        )
    for name, rates in _throughputs(trainers, batch, trials, seconds).items():
        mean = statistics.mean(rates)
        place = next(i for i, row in enumerate(rows) if row.name == name)
        rows[place] = dataclasses.replace(
            rows[place],
            samples_per_second=mean,
            samples_per_second_std=statistics.stdev(rates),
            tflops=mean * flops / 1e12,
            share_of_peak=mean * flops / 1e12 / max(peaks.values()),
        )
    return {
        "peaks": peaks,
        "flops_per_sample": flops,
        "batch_size": len(batch[0]),
        "steps": steps,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _peak_on_cpu(trainer: Trainer, batch: Batch) -> int:
    weights = copy.deepcopy(trainer.model.state_dict())
    peak = peak_bytes_on_cpu(lambda: trainer.train(iter([batch])), trainer.model, trainer.optimizer)
    trainer.model.load_state_dict(weights)  # that was a step too many
    return peak


def _throughputs(trainers: dict[str, Trainer], batch: Batch, trials: int, seconds: float) -> dict[str, list[float]]:
    """Return samples per second of each row, ``trials`` times, in turn."""

    def time_of(trainer: Trainer, steps: int) -> float:
        started = time.perf_counter()
        trainer.train(repeat(batch, steps))
        synchronize(trainer.device)
        return time.perf_counter() - started

    for trainer in trainers.values():
        if trainer.config.cuda_graph:  # however few steps there were, it is recorded now
            trainer.train(repeat(batch, EAGER_STEPS + 1))
    steps = {name: repeats_for(seconds, partial(time_of, trainer), first=3) for name, trainer in trainers.items()}
    rates: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(trials):
        for name, trainer in trainers.items():
            rates[name].append(steps[name] * len(batch[0]) / time_of(trainer, steps[name]))
    return rates
