"""The optimizers, by name."""

from torch import nn, optim

from workshop.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> optim.Optimizer:
    """Build ``config.optimizer`` over the parameters of ``model``; SGD gets the customary momentum of 0.9."""
    parameters = model.parameters()
    if config.optimizer == "sgd":
        return optim.SGD(parameters, lr=config.lr, momentum=0.9)
    optimizers = {"adam": optim.Adam, "adamw": optim.AdamW, "adadelta": optim.Adadelta}
    return optimizers[config.optimizer](parameters, lr=config.lr)
