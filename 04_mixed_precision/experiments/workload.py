"""The workload of the experiments of lesson 04: their flags, and the configuration they take by default."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from workshop.commandline import load_config
from workshop.errors import UserError
from workshop.measuring.launching import load_script
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "04_mixed_precision")
"""the train.py whose step is measured"""

FORMATS: dict[str, dict[str, Any]] = {name: {"precision": name} for name in ("fp32", "tf32", "fp16", "bf16")}
MORE: dict[str, dict[str, Any]] = {
    "channels_last": {"channels_last": True},
    "cudnn_benchmark": {"cudnn_benchmark": True},
    "fused": {"fused": True},
    "compile": {"compile": "default"},
    "cuda_graph": {"cuda_graph": True},
}
"""each of these is added to the ones before it that the device has, on top of bf16"""

QUICK = {"global_batch_size": None, "batch_size": 4, "limit_val": 64}
"""with --quick true, on top of everything: the smallest work that shows all there is to see"""
QUICK_VOLUMES = {"crop_size": 8, "train_crops": 16, "val_crops": 4}
"""likewise, where the samples are volumes"""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(LESSON.Config):
    """The flags of the workload, as train.py has them, and of the measurement."""

    quick: bool = False
    """little work, in seconds: to see that it works"""
    steps: int = 100
    """training steps before a validation loss is taken"""
    out: Path | None = None
    """folder for the record and the plot (default: its name under the lesson's runs)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise UserError(f"--steps must be at least 1, got {self.steps}")


C = TypeVar("C", bound=WorkloadConfig)


def training_device() -> torch.device:
    """Return the device that train.py would take: a CUDA GPU, else the CPU; others have no float64 to compare with."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_workload(config_class: type[C], device: torch.device, description: str, **quick: object) -> C:
    """Read the command line; without --config the U-Net is the workload, full on a GPU and tiny elsewhere.

    With ``--quick true``, `QUICK`, `QUICK_VOLUMES` and ``quick`` replace what was asked for.

    Raises:
        UserError: it makes no sense, or sets an option that the experiment sets itself.
    """
    arguments = sys.argv[1:]
    if not any(word.partition("=")[0] == "--config" for word in arguments):
        names = ("unet3d.yaml", "unet3d_short.yaml" if device.type == "cuda" else "unet3d_tiny.yaml")
        files = [word for name in names for word in ("--config", str(REPOSITORY / "configs" / name))]
        arguments = files + arguments
    config = load_config(config_class, arguments, description=description)
    plain = config_class()
    for name in (name for options in (FORMATS["fp32"], *MORE.values()) for name in options):
        if getattr(config, name) != getattr(plain, name):
            raise UserError(f"--{name} is what this experiment varies; leave it out")
    if config.quick:
        volumes = QUICK_VOLUMES if config.dataset == "nbody" else {}
        config = dataclasses.replace(config, **QUICK, **volumes, **quick)
    if config.global_batch_size:  # there is one rank
        config = dataclasses.replace(config, batch_size=config.global_batch_size, global_batch_size=None)
    return config
