"""What the experiments of lesson 04 train: the full U-Net on a GPU, the tiny one on a CPU, by the lesson's train.py."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lab.launching import load_script
from workshop.config import load_config
from workshop.loaders import Loader
from workshop.paths import REPOSITORY
from workshop.ranks import Ranks

FOLDER = REPOSITORY / "04_mixed_precision"
LESSON: Any = load_script(FOLDER)
FULL = ("--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_short.yaml", "--loader", "device")
TINY = ("--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml")


def training_device() -> torch.device:
    """Return the device that train.py takes, and that has float64 to compare with: an NVIDIA GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def workload_flags(more: list[str]) -> list[str]:
    """Return the flags of the workload, as they are typed in the lesson's folder: the U-Net unless ``more`` names one.

    Args:
        more: flags of train.py, which win.
    """
    if any(word.partition("=")[0] == "--config" for word in more):
        return more
    return [*(FULL if training_device().type == "cuda" else TINY), *more]


def read_workload(more: list[str]) -> Any:  # noqa: ANN401, the lesson's Config
    """Return the configuration of the workload, for the single rank of this process."""
    words = [word.replace("../configs", str(REPOSITORY / "configs")) for word in workload_flags(more)]
    config = load_config(LESSON.Config, words)
    return LESSON.replace(config, batch_size=LESSON.batch_size_per_rank(config, 1))


def first_model(config: Any, device: torch.device) -> nn.Module:  # noqa: ANN401
    """Return the model of the workload with the weights of its seed."""
    torch.manual_seed(config.seed)
    return LESSON.make_model(config).to(device)


def first_batches(
    config: Any,  # noqa: ANN401
    device: torch.device,
    steps: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield so many whole batches (inputs, targets) on ``device``, epoch after epoch; always the same ones."""
    loader: Loader = LESSON.make_loader(config, "train", Ranks(device=device))

    def all_epochs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for epoch in itertools.count(1):
            loader.batch_sampler.set_epoch(epoch)
            for inputs, targets in loader:
                if len(targets) == config.batch_size:
                    yield inputs.to(device), targets.to(device)

    yield from itertools.islice(all_epochs(), steps)


def training_of(config: Any, model: nn.Module, device: torch.device, scaler: torch.amp.GradScaler | None = None) -> Any:  # noqa: ANN401
    """Return the lesson's training state for a model of one rank, with a constant learning rate.

    The lesson's step calls ``training.compiled``, which is the model itself here, without DDP.
    """
    optimizer = LESSON.make_optimizer(config, model)
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    scheduler = LESSON.LambdaLR(optimizer, lambda _: 1.0)
    return LESSON.Training(model, model, optimizer, scheduler, scaler, Ranks(device=device))
