"""Lesson 01's train.py, unchanged, with an emulated GPU: where does the time show, and how many workers does it need?

    python experiments/emulated_gpu.py --num_workers 2
    kernprof -lv experiments/emulated_gpu.py --num_workers 12               # the time of each line of train.py
    python experiments/emulated_gpu.py --num_workers 12 --benchmark true    # IO, SYNTHETIC and FULL

You should see that a step takes as long as loading with 2 workers, and as long as the emulated GPU with 12. The digits
only stand in for other samples: loading one takes as long as a sample took in the published figures that --gpu names,
and so does training on it, but neither needs much CPU. All flags of train.py work; --log_interval 1 reads the loss in
every step. Losses and accuracies are left out of the log, because the emulated GPU computes nothing.
"""

import re
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lab.emulated_gpu import FORWARD_SHARE, PUBLISHED, Durations, EmulatedGPU, EmulatedTensor, add_to_trace
from lab.launching import load_script
from workshop.config import require_positive, run_with_config
from workshop.datasets import image_dataset
from workshop.errors import UserError
from workshop.loaders import ImageDataset
from workshop.log import Log
from workshop.paths import default_runs_dir, lesson_name

train: Any = load_script(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, kw_only=True)
class EmulatedConfig(train.Config):
    """The flags of the emulated GPU, and those of the lesson that are better smaller here."""

    gpu: Literal["a100", "a100_optimized", "v100"] = "a100"
    """whose published durations to use: those of a 3D U-Net (a100, and a100_optimized with DALI and AMP), or those of
    this lesson's own task, with the real loading time of this machine (v100)"""
    gpu_milliseconds: float | None = None
    """time that the emulated GPU needs for one sample (default: as --gpu)"""
    load_milliseconds: float | None = None
    """time that one loader worker needs for one sample; 0: no more than it really takes (default: as --gpu)"""
    batch_size: int = 8
    """samples per step and process"""
    log_interval: int = 10
    """steps between two log lines"""
    limit_train: int | None = 640
    """train on this many samples only"""
    limit_val: int | None = 8
    """validate on this many samples only"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "gpu_milliseconds")
        if self.load_milliseconds is not None and self.load_milliseconds < 0:
            raise UserError(f"--load_milliseconds must be 0 or more, got {self.load_milliseconds}")
        if self.loader != "map":
            raise UserError(f"--loader {self.loader} loads at its own speed; only --loader map is emulated")

    @property
    def durations(self) -> Durations:
        """What one sample takes."""
        found = PUBLISHED[self.gpu]
        if self.gpu_milliseconds is not None:
            found = replace(found, gpu=self.gpu_milliseconds / 1e3, what="durations of the command line")
        if self.load_milliseconds is not None:
            found = replace(found, load=self.load_milliseconds / 1e3, what="durations of the command line")
        return found


class _Step(torch.autograd.Function):
    """Forward and backward of a whole network: each launches its work and returns at once."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, samples: int, seconds: float) -> torch.Tensor:  # noqa: ANN401
        EmulatedTensor.gpu.launch("forward", FORWARD_SHARE * seconds)
        ctx.backward_seconds = (1 - FORWARD_SHARE) * seconds
        return scores.expand(samples, -1).clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        EmulatedTensor.gpu.launch("backward", ctx.backward_seconds)
        return None, None, None  # no gradients: the optimizer has nothing to do on the CPU


class EmulatedModel(nn.Module):
    """A classifier that takes time on the emulated GPU, and gives each class the same score."""

    def __init__(self, classes: int, seconds_per_sample: float) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(classes))
        self.seconds_per_sample = seconds_per_sample

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, C, H, W) to class scores (N, classes)."""
        seconds = self.seconds_per_sample * len(images)
        return _Step.apply(self.scores, len(images), seconds).as_subclass(EmulatedTensor)


class SlowDataset(ImageDataset):
    """Images that take as long to prepare as those of the published figures: for the rest of that time it sleeps.

    It sleeps once for all samples of a batch. If the system wakes it too late, the next batch takes less by as much.
    """

    def __init__(self, seconds: float, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self._late = 0.0

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
        """Return the samples of a batch; PyTorch calls this if there is one."""
        due = time.perf_counter() + self.seconds * len(keys) - self._late
        samples = [self[key] for key in keys]
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late = min(max(0.0, time.perf_counter() - due), self.seconds * len(keys))
        return samples


class LogOfTimes(Log):
    """Prints neither losses nor accuracies, because with an emulated GPU they mean nothing."""

    def __enter__(self) -> "LogOfTimes":
        super().__enter__()
        found = self.config.durations  # type: ignore[attr-defined]
        of_sample = f"{1e3 * found.gpu:.3g} ms a sample on the GPU, {1e3 * found.load:.3g} ms in a loader worker"
        self.log_summary(f"emulated GPU: {found.what}: {of_sample}", emulated_gpu=f"{found.what}: {of_sample}")
        return self

    def print(self, line: str) -> None:
        """Print one line without its losses and accuracies."""
        super().print(re.sub(r"((train |val )?loss|accuracy) \S+  ", "", line))


def main(config: Any) -> None:  # noqa: ANN401
    """Run the lesson's ``main`` with a device, a model and a data set that take the time of ``config.durations``."""
    if config.run_dir is None:
        config = replace(config, run_dir=default_runs_dir() / lesson_name() / "emulated_gpu")
    EmulatedTensor.gpu = gpu = EmulatedGPU()
    torch.set_num_threads(1)  # with little to compute, several threads would only wait for each other
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs: these need no CPU
    classes = image_dataset(config.dataset).NUM_CLASSES
    train.pick_device = lambda: torch.device("cpu")  # where there is a real GPU, it is not used
    train.build_model = lambda *_, **__: EmulatedModel(classes, config.durations.gpu)
    train.ImageDataset = partial(SlowDataset, config.durations.load)
    train.Log = LogOfTimes
    train.main(config)
    trace = config.run_dir / "rank0.pt.trace.json.gz"
    if config.trace and trace.exists():
        add_to_trace(trace, gpu)


if __name__ == "__main__":
    run_with_config(main, EmulatedConfig, __doc__)
