"""What each option of lesson 04 costs and gives, measured on the same work, each configuration in its own process.

cuDNN keeps the algorithm that it has chosen for a convolution, and looks there before it looks at
``torch.backends.cudnn.benchmark``. In a process in which another configuration has trained before, it would therefore
search for nothing, and `+ cudnn_benchmark` would show no difference. `compare` starts the processes, `measure` is what
each of them does, and `prepare` what they share.
"""

import copy
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matrix_peak import matrix_peak, synchronize
from tensor_memory import PeakOnCuda, peak_bytes_on_cpu
from trainer import Batch, Trainer, batches_of, errors_of, flops_per_sample, reference
from workload import FORMATS, LESSON, MORE, WorkloadConfig, make_loaders
from workshop.errors import UserError
from workshop.hardware import describe_hardware
from workshop.loaders import Loader
from workshop.profiling.calibration import repeats_for

DEFAULT_SWITCHES = "fp32, default settings"
"""the configuration for which nobody sets TF32: on NVIDIA GPUs convolutions round to it, and matrix products do not"""
NAMES = ("fp32", "tf32", DEFAULT_SWITCHES, "fp16", "bf16", *(f"+ {name}" for name in MORE))
"""all configurations: the number formats alone; then on top of bf16, each with one option more than the one before"""
SHARED = "shared"
"""in place of a configuration's name: what `prepare` does"""


def reset_switches() -> None:
    """Set torch's switches to what they are when it is imported."""
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class Measurement:
    """What one configuration costs and gives; where it was not measured, only the note, which says why."""

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


def options_of(name: str, config: WorkloadConfig, left_out: Collection[str]) -> WorkloadConfig:
    """Return the configuration of a name; one with a + has all options up to it but for those that are ``left_out``."""
    if name == DEFAULT_SWITCHES:
        return config
    if name in FORMATS:
        return dataclasses.replace(config, **FORMATS[name])
    options = dict(FORMATS[base(left_out)])
    for more in NAMES[len(FORMATS) + 1 : NAMES.index(name) + 1]:
        if more == name or more not in left_out:
            options |= MORE[more.removeprefix("+ ")]
    return dataclasses.replace(config, **options)


def base(left_out: Collection[str]) -> str:
    """Return the name of the configuration that the options are added to."""
    return "fp32" if "bf16" in left_out else "bf16"


def missing(config: WorkloadConfig, device: torch.device, compiled: bool = True) -> dict[str, str]:
    """Return what the device lacks for a configuration, by name; without ``compiled``, torch.compile is left out."""
    found: dict[str, str] = {}
    for name in NAMES:
        if name == DEFAULT_SWITCHES and "tf32" in found:
            found[name] = "where there is no TF32, it is fp32"
        elif name == "+ compile" and not compiled:
            found[name] = "left out by --quick"
        elif lack := _lack(options_of(name, config, found), device):
            found[name] = lack
    return found


def _lack(config: WorkloadConfig, device: torch.device) -> str:
    try:
        LESSON.check_options(config, device)
    except UserError as error:
        return str(error)
    return ""


# --- the process that starts the others -------------------------------------------------------------------------------


def compare(folder: Path, run: Callable[[str], str], repeated: bool = True) -> Iterator[dict[str, Any]]:
    """Measure all configurations, one process after the other; yield all figures there are after each of them.

    The trials of a configuration follow one another in its process. So a machine whose speed changes within minutes
    would favour some configurations. Therefore the one that the options are added to is ``repeated`` at the end.
    This process computes nothing itself, so it holds no memory of a GPU.

    Args:
        folder: in which the processes leave their files.
        run: starts a process for the configuration of this name, or for `SHARED`, waits for its end and returns why it
            failed, or "".
        repeated: measure one configuration a second time.

    Yields:
        hardware, peaks (10^12 operations/s of a matrix product by precision), flops_per_sample, batch_size, reference
        (why no errors were measured, or ""), rows; at the end also repeated: name, note, samples_per_second and
        samples_per_second_std of the second measurement; until then unfinished, which is True.

    Raises UserError: what the configurations share could not be prepared.
    """
    if reason := run(SHARED):
        raise UserError(reason)
    measurements: list[Measurement] = []

    def measured(name: str) -> Measurement:
        reason = run(name)
        return Measurement(name, note=f"failed: {reason}") if reason else Measurement(**_read(folder, "configuration"))

    def figures(**more: object) -> dict[str, Any]:
        shared = _read(folder, SHARED)
        peak = max(shared["peaks"].values(), default=0)
        return {
            **{key: shared[key] for key in ("hardware", "peaks", "flops_per_sample", "batch_size", "reference")},
            "rows": [
                dataclasses.asdict(_with_tflops(measurement, shared["flops_per_sample"], peak))
                for measurement in measurements
            ],
            **more,
        }

    for name in NAMES:
        left_out = _read(folder, SHARED)["left_out"]
        if name in left_out:
            measurements.append(Measurement(name, note=f"not available: {left_out[name]}"))
            continue
        print(f"  {name} ...", flush=True)
        measurements.append(measured(name))
        if measurements[-1].note:
            print(f"  {measurements[-1].note}", flush=True)
            _update(folder, SHARED, left_out=left_out | {name: measurements[-1].note})
        yield figures(unfinished=True)
    if not repeated:
        yield figures()
        return
    again = base(_read(folder, SHARED)["left_out"])
    print(f"  {again} again ...", flush=True)
    measurement = measured(again)
    kept = ("name", "note", "samples_per_second", "samples_per_second_std")
    yield figures(repeated={key: getattr(measurement, key) for key in kept})


def _with_tflops(measurement: Measurement, flops_per_sample: float, peak: float) -> Measurement:
    if measurement.samples_per_second is None:
        return measurement
    tflops = measurement.samples_per_second * flops_per_sample / 1e12
    return dataclasses.replace(measurement, tflops=tflops, share_of_peak=tflops / peak)


# --- the processes that are started -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What every configuration works on: the same first weights, the same batches."""

    train_loader: Loader
    val_loader: Loader
    model: nn.Module
    batch: Batch

    @classmethod
    def of(cls, config: WorkloadConfig, device: torch.device) -> "Work":
        """Build it; the same in every process."""
        train_loader, val_loader = make_loaders(config, device)
        torch.manual_seed(config.seed)
        model = LESSON.make_model(config).to(device)
        inputs, targets = next(batches_of(train_loader, 1))
        return cls(train_loader, val_loader, model, (inputs.to(device), targets.to(device)))


def prepare(config: WorkloadConfig, device: torch.device, folder: Path, compiled: bool = True) -> None:
    """Write into ``folder`` what all configurations share.

    These are the hardware, the configurations that the device lacks something for, the operations per sample, and the
    outputs and gradients in float64, without which the errors are not measured.
    """
    work = Work.of(config, device)
    note = ""
    try:
        torch.save(reference(work.model, *work.batch), folder / "reference.pt")
    except (RuntimeError, MemoryError) as error:
        note = f"errors not measured: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    figures = {
        "hardware": describe_hardware(device),
        "left_out": missing(config, device, compiled),
        "flops_per_sample": flops_per_sample(config, work.batch),
        "batch_size": len(work.batch[0]),
        "reference": note,
        "peaks": {},
    }
    _write(folder, SHARED, figures)


def measure(
    name: str, config: WorkloadConfig, device: torch.device, folder: Path, steps: int, trials: int, seconds: float
) -> None:
    """Measure one configuration, in this process alone, and write what was found into ``folder``.

    It is first compared with float64 on one batch. Then it trains on ``steps`` batches, is validated, and trains on one
    batch again and again for the throughput: ``trials`` times for about ``seconds``.

    Args:
        name: one of `NAMES`.
        config: the workload, without any option.
        device: where to compute.
        folder: where `prepare` has left what is shared.
        steps: training steps before the validation loss is taken.
        trials: how often the throughput is measured.
        seconds: about how long each time.

    Raises UserError: the device lacks something that the configuration needs.
    """
    shared = _read(folder, SHARED)
    if name in shared["left_out"]:
        raise UserError(f"{name}: {shared['left_out'][name]}")
    options = options_of(name, config, shared["left_out"])
    work = Work.of(config, device)
    cuda_peak = PeakOnCuda(device) if device.type == "cuda" else None
    switches = reset_switches if name == DEFAULT_SWITCHES else None  # None: those of the options
    trainer = Trainer(options, work.model, device, set_switches=switches)
    outputs, gradients = None, None
    if not shared["reference"]:
        truth = torch.load(folder / "reference.pt", map_location=device)
        outputs, gradients = errors_of(trainer, work.batch, truth)
        del truth
    if cuda_peak:
        cuda_peak.reset()  # comparing is no part of training
    trainer.train(batches_of(work.train_loader, steps))
    peak_memory = cuda_peak.bytes() if cuda_peak else _peak_on_cpu(trainer, work.batch)
    val_loss = trainer.validate(work.val_loader)
    rates = _throughputs(trainer, work.batch, trials, seconds)
    if options.precision not in shared["peaks"]:  # after the rest, so that it leaves nothing behind
        peaks = shared["peaks"] | {options.precision: matrix_peak(options.precision, device)}
        _update(folder, SHARED, peaks=peaks)
    measurement = Measurement(
        name,
        samples_per_second=statistics.mean(rates),
        samples_per_second_std=statistics.stdev(rates),
        peak_memory_bytes=peak_memory,
        output_error=outputs,
        gradient_error=gradients,
        val_loss=val_loss,
    )
    _write(folder, "configuration", dataclasses.asdict(measurement))


def _peak_on_cpu(trainer: Trainer, batch: Batch) -> int:
    weights = copy.deepcopy(trainer.model.state_dict())
    peak = peak_bytes_on_cpu(lambda: trainer.train(iter([batch])), trainer.model, trainer.optimizer)
    trainer.model.load_state_dict(weights)  # that was a step too many
    return peak


def _throughputs(trainer: Trainer, batch: Batch, trials: int, seconds: float) -> list[float]:
    """Return samples per second, ``trials`` times."""

    def time_of(trainer: Trainer, steps: int) -> float:
        started = time.perf_counter()
        trainer.train(repeat(batch, steps))
        synchronize(trainer.device)
        return time.perf_counter() - started

    if trainer.config.cuda_graph:  # however few steps there were, it is captured now
        trainer.train(repeat(batch, LESSON.GraphedStep.EAGER_STEPS + 1))
    steps = repeats_for(seconds, partial(time_of, trainer), first=3)
    return [steps * len(batch[0]) / time_of(trainer, steps) for _ in range(trials)]


# --- files between the processes --------------------------------------------------------------------------------------


def _read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def _write(folder: Path, name: str, figures: dict[str, Any]) -> None:
    unfinished = folder / f"{name}.part"
    unfinished.write_text(json.dumps(figures))
    os.replace(unfinished, folder / f"{name}.json")


def _update(folder: Path, name: str, **figures: object) -> None:
    _write(folder, name, _read(folder, name) | figures)
