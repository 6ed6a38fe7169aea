"""The optimizers, by name."""

import torch
from torch import nn, optim

from workshop.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module, capturable: bool = False) -> optim.Optimizer:
    """Build ``config.optimizer`` over the parameters of ``model``; SGD gets the customary momentum of 0.9.

    With ``capturable`` a CUDA graph can hold its step: all that the step reads and counts, even the learning rate, is
    on the device.
    """
    parameters = list(model.parameters())
    lr = torch.tensor(config.lr, device=parameters[0].device) if capturable else config.lr
    if config.optimizer == "adadelta":
        return optim.Adadelta(parameters, lr=lr, capturable=capturable)
    fused = config.fused or None  # None: PyTorch's own choice
    if config.optimizer == "sgd":
        return optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)
    optimizers = {"adam": optim.Adam, "adamw": optim.AdamW}
    return optimizers[config.optimizer](parameters, lr=lr, fused=fused, capturable=capturable)


def scale_lr(optimizer: optim.Optimizer, scheduler: optim.lr_scheduler.LRScheduler | None, factor: float) -> None:
    """Multiply the present learning rate by ``factor``, and those that the schedule starts from."""
    for group in optimizer.param_groups:
        for name in group.keys() & {"lr", "initial_lr"}:
            group[name] *= factor
    if scheduler:
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
