"""The optimizers, by name."""

import torch
from torch import nn, optim

from workshop.config import TrainConfig
from workshop.errors import UserError


def build_optimizer(
    config: TrainConfig, model: nn.Module, fused: bool = False, capturable: bool = False
) -> optim.Optimizer:
    """Build ``config.optimizer`` over the parameters of ``model``; SGD gets the customary momentum of 0.9.

    Args:
        config: names the optimizer and the learning rate.
        model: has its parameters on the device already.
        fused: update all parameters in one kernel.
        capturable: keep all that a step reads and counts, even the learning rate, on the device, so that a CUDA graph
            can hold the step.

    Raises:
        UserError: the optimizer lacks one of these.
    """
    name = config.optimizer
    parameters = list(model.parameters())
    lr = torch.tensor(config.lr, device=parameters[0].device) if capturable else config.lr
    if name == "adadelta":
        if fused:
            raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
        return optim.Adadelta(parameters, lr=lr, capturable=capturable)
    if name == "sgd":
        if capturable and not fused:
            raise UserError(
                "--cuda_graph true with --optimizer sgd needs --fused true, which reads the rate on the GPU"
            )
        return optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused or None)  # None: PyTorch's own choice
    optimizers = {"adam": optim.Adam, "adamw": optim.AdamW}
    return optimizers[name](parameters, lr=lr, fused=fused or None, capturable=capturable)


def scale_lr(optimizer: optim.Optimizer, scheduler: optim.lr_scheduler.LRScheduler | None, factor: float) -> None:
    """Multiply the present learning rate by ``factor``, and those that the schedule starts from."""
    for group in optimizer.param_groups:
        for name in group.keys() & {"lr", "initial_lr"}:
            group[name] *= factor
    if scheduler:
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
