"""The models, by name."""

from collections.abc import Callable

from torch import nn

from workshop.config import TrainConfig, nearest
from workshop.errors import UserError
from workshop.models.mnist_cnn import MnistCNN

MODELS: dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN}


def build_model(config: TrainConfig) -> nn.Module:
    """Build ``config.model`` with fresh weights.

    Raises:
        UserError: no model has that name.
    """
    if config.model not in MODELS:
        raise UserError(f"--model {config.model} is unknown; {nearest(config.model, MODELS)}")
    return MODELS[config.model]()
