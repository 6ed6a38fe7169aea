"""The models, by name: the workshop's own, and the classifiers of torchvision."""

import warnings
from collections.abc import Callable

import torch
import torchvision
from torch import nn

from workshop.config import TrainConfig, nearest
from workshop.datasets import DATASETS, DataSet
from workshop.errors import UserError
from workshop.models.mnist_cnn import MnistCNN
from workshop.models.small_cnn import CifarCNN

MODELS: dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN, "cifar_cnn": CifarCNN}
"""The workshop's own; each is made for the samples of one data set."""


def build_model(config: TrainConfig) -> nn.Module:
    """Build ``config.model`` with fresh weights, to classify the samples of ``config.dataset``.

    Besides `MODELS`, any classifier that torchvision registers can be had by its name, such as ``resnet152``.

    Raises:
        UserError: no model has that name, or it does not fit the data set.
    """
    dataset = DATASETS[config.dataset]
    theirs = torchvision.models.list_models(module=torchvision.models)
    if config.model in MODELS:
        model = MODELS[config.model]()
    elif config.model in theirs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # on initial weights that will change, of some models
            model = torchvision.models.get_model(config.model, weights=None, num_classes=dataset.NUM_CLASSES)
    else:
        raise UserError(f"--model {config.model} is unknown; {nearest(config.model, [*MODELS, *theirs])}")
    if misfit := _misfit(model, dataset):
        fitting = " or ".join(name for name, build in MODELS.items() if not _misfit(build(), dataset))
        shape = "x".join(map(str, dataset.SAMPLE_SHAPE))
        raise UserError(
            f"--model {config.model} does not fit the {shape} samples of --dataset {config.dataset} ({misfit}); "
            f"--model {fitting} does"
        )
    return model


def _misfit(model: nn.Module, dataset: DataSet) -> str | None:
    """Say what goes wrong when the model is shown samples of the data set; None if nothing does.

    This works on the meta device, where tensors have shapes but no numbers: it takes some tenths of a second even for
    a large model, and leaves the model and the random numbers as they were.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    try:
        scores = torch.func.functional_call(model, shapes, torch.empty(2, *dataset.SAMPLE_SHAPE, device="meta"))
    except Exception as error:  # whatever it is, the user is told
        return str(error)
    if not isinstance(scores, torch.Tensor):
        return f"it returns {type(scores).__name__}, not one tensor of scores"
    if scores.shape != (2, dataset.NUM_CLASSES):
        return f"it returns {scores.shape[1:].numel()} scores, not {dataset.NUM_CLASSES}"
    return None
