"""A value read from the device in every step: the loop is to read one only now and then, and report the same loss."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from clinic import coded
from clinic.observe import Script
from workshop.paths import REPOSITORY

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "__format__")
"""what of a tensor waits for the device, `Tensor.to` with "cpu" beside"""
ITS_OWN = ("torch/optim/", "torch/utils/data/", f"{REPOSITORY / 'workshop'}/", f"{REPOSITORY / 'clinic'}/")
"""who may read: optimizers on a CPU keep their step there, loaders have no device, the package does so on purpose"""
SAMPLES, BATCH, INTERVAL = 196, 8, 10


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    flags = ("--batch_size", BATCH, "--log_interval", INTERVAL)
    run = script.run(*flags, train=SAMPLES, val=8, keep=True, watch=note_reads)
    reads: Counter[tuple[str, int]] = run[0].extra
    steps = len(run[0].updates)
    often = {place: count for place, count in reads.items() if count > steps / INTERVAL + 1}
    for (name, line), count in often.items():
        yield f"in {steps} training steps, line {line} waits {count} times for a value from the device ({name})"
    if sum(reads.values()) > 2 * steps / INTERVAL + 2 and not often:
        yield f"in {steps} training steps, the CPU waits {sum(reads.values())} times for a value from the device"
    if sorted(run[0].trained) != list(range(SAMPLES)):
        yield f"it does not train on each of the {SAMPLES} samples once"
    loss_sum = 0.0
    for call in run[0].shown:
        if call.training:
            loss_sum += F.cross_entropy(
                call.outputs, coded.label_of(torch.tensor(call.samples)), reduction="sum"
            ).item()
    reported = run.epochs[-1]["train_loss"] if run.epochs else None
    if reported is None:
        yield "there is no loss in summary.json"
    elif abs(reported - loss_sum / SAMPLES) > 1e-4 * abs(reported):
        yield f"it reports a training loss of {reported:.4f}; over its samples it is {loss_sum / SAMPLES:.4f}"


def note_reads(script: Path) -> Callable[[], Counter[tuple[str, int]]]:
    """Count what the script's own lines read while the model trains, by method and line; see `Script.run`."""
    reads: Counter[tuple[str, int]] = Counter()
    training = False
    reading = False

    def before_forward(module: torch.nn.Module, _: tuple) -> None:
        nonlocal training
        if next(module.parameters(), None) is not None:  # no transform of the data set
            training = module.training

    def line_of_script() -> int | None:
        frame = sys._getframe(2)
        while frame and frame.f_code.co_filename != str(script):
            if any(part in frame.f_code.co_filename for part in ITS_OWN):
                return None
            frame = frame.f_back
        line = frame.f_lineno if frame else None
        while frame:  # a data set of the script's own, called by a loader
            if "torch/utils/data/" in frame.f_code.co_filename:
                return None
            frame = frame.f_back
        return line

    def noting(name: str) -> None:
        own = getattr(torch.Tensor, name)

        @wraps(own)
        def noted(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            nonlocal reading
            reads_now = name != "to" or "cpu" in (*arguments, *keywords.values())
            if reading or not training or not reads_now:
                return own(tensor, *arguments, **keywords)
            if line := line_of_script():
                reads[name.strip("_"), line] += 1
            reading = True  # what it calls in its turn is the same read
            try:
                return own(tensor, *arguments, **keywords)
            finally:
                reading = False

        setattr(torch.Tensor, name, noted)

    for name in (*READS, "to"):
        noting(name)
    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    return lambda: reads
