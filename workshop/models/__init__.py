"""The classifiers, by name: the workshop's own, and those of torchvision."""

import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from workshop.datasets import image_dataset
from workshop.errors import UserError, nearest
from workshop.models.cifar_cnn import CifarCNN
from workshop.models.mnist_cnn import MnistCNN

MODELS: dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN, "cifar_cnn": CifarCNN}
"""The workshop's own classifiers; each is made for the samples of one data set."""


def build_model(name: str, dataset: str, *, dropout: bool = True) -> nn.Module:
    """Build the classifier ``name`` with fresh weights, for the images of ``dataset``.

    Besides `MODELS`, every classifier that torchvision registers can be had by its name, such as ``resnet152``.

    Args:
        name: as ``--model``.
        dataset: as ``--dataset``.
        dropout: False switches dropout layers off; they then use no random numbers either.

    Raises:
        UserError: no model has that name, or it does not fit the data set.
    """
    images = image_dataset(dataset)
    model = MODELS[name]() if name in MODELS else _torchvision_model(name, images.NUM_CLASSES)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not dropout:
            layer.p = 0.0
    if problem := _misfit(model, images):
        fitting = " or ".join(known for known, build in MODELS.items() if not _misfit(build(), images))
        raise UserError(f"--model {name} does not fit --dataset {dataset} ({problem}); --model {fitting} does")
    return model


def _torchvision_model(name: str, num_classes: int) -> nn.Module:
    import torchvision  # here: it takes longer to import than torch itself, and few runs need it

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UserError(f"--model {name} is unknown; {nearest(name, [*MODELS, *known])}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # on initial weights that will change, of some models
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes)


def _misfit(model: nn.Module, dataset: ModuleType) -> str | None:
    """Say what goes wrong when the model is shown samples of the data set; None if nothing does.

    This works on the meta device, where tensors have shapes but no numbers: it takes some tenths of a second even for
    a large model, and leaves the model and the random numbers as they were.
    """
    if getattr(model, "MADE_FOR", None) == (dataset.SAMPLE_SHAPE, dataset.NUM_CLASSES):
        return None  # the first tensor on the meta device lets PyTorch import modules for a second
    state = {name: tensor.detach().to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    samples = torch.empty(2, *dataset.SAMPLE_SHAPE, device="meta")
    try:
        scores = torch.func.functional_call(model, state, samples)
        return None if scores.shape == (2, dataset.NUM_CLASSES) else f"it returns scores of shape {tuple(scores.shape)}"
    except Exception as error:  # whatever it is, the message for the user contains it
        return str(error)
