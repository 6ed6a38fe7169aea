"""The optimizers, by name."""

from torch import nn, optim

from workshop.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> optim.Optimizer:
    """Build ``config.optimizer`` over the parameters of ``model``; SGD gets the customary momentum of 0.9."""
    parameters = model.parameters()
    if config.optimizer == "adadelta":
        return optim.Adadelta(parameters, lr=config.lr)
    fused = config.fused or None  # None: PyTorch's own choice
    if config.optimizer == "sgd":
        return optim.SGD(parameters, lr=config.lr, momentum=0.9, fused=fused)
    optimizers = {"adam": optim.Adam, "adamw": optim.AdamW}
    return optimizers[config.optimizer](parameters, lr=config.lr, fused=fused)
