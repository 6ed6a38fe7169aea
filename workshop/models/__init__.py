"""The models, by name: the workshop's own, and the classifiers of torchvision."""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from workshop.config import TrainConfig, VolumeFlags
from workshop.datasets import IMAGES, ImageDataSet
from workshop.errors import UserError, nearest
from workshop.models.mnist_cnn import MnistCNN
from workshop.models.small_cnn import CifarCNN
from workshop.models.unet3d import UNet3D

MODELS: dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN, "cifar_cnn": CifarCNN}
"""The workshop's own classifiers; each is made for the samples of one data set."""
VOLUME_MODEL = "unet3d"
"""the one that maps volumes to volumes"""


def build_model(config: TrainConfig) -> nn.Module:
    """Build ``config.model`` with fresh weights, for the samples of ``config.dataset``.

    Besides `MODELS`, any classifier that torchvision registers can be had by its name, such as ``resnet152``; and the
    U-Net for volumes.

    Raises UserError: no model has that name, or it does not fit the data set.
    """
    maps_volumes = f"--model {VOLUME_MODEL} maps volumes to volumes"
    if config.dataset == "nbody":
        if config.model != VOLUME_MODEL:
            raise UserError(f"--dataset nbody holds volumes, and only {maps_volumes}")
        return _build_unet(config)
    if config.model == VOLUME_MODEL:
        raise UserError(f"{maps_volumes}: it needs --dataset nbody, not {config.dataset}")
    dataset = IMAGES[config.dataset]
    model = MODELS[config.model]() if config.model in MODELS else _torchvision_model(config.model, dataset.NUM_CLASSES)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not config.dropout:
            layer.p = 0.0  # then it draws no random numbers either
    if misfit := _misfit(model, dataset):
        fitting = " or ".join(name for name, build in MODELS.items() if not _misfit(build(), dataset))
        shape = "x".join(map(str, dataset.SAMPLE_SHAPE))
        raise UserError(
            f"--model {config.model} does not fit the {shape} samples of --dataset {config.dataset} ({misfit}); "
            f"--model {fitting} does"
        )
    return model


def _torchvision_model(name: str, num_classes: int) -> nn.Module:
    import torchvision  # here: it takes longer to import than torch itself, and few runs need it

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UserError(f"--model {name} is unknown; {nearest(name, [*MODELS, VOLUME_MODEL, *known])}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # on initial weights that will change, of some models
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes)


def _build_unet(config: VolumeFlags) -> nn.Module:
    if config.crop_size % 2**config.depth:
        halvings = (config.crop_size & -config.crop_size).bit_length() - 1
        near = max(round(config.crop_size / 2**config.depth), 1) * 2**config.depth
        raise UserError(
            f"--crop_size {config.crop_size} cannot be halved {config.depth} times; take --crop_size {near}"
            + (f", or --depth {halvings}" if halvings else "")
        )
    return UNet3D(config.width, config.depth)


def _misfit(model: nn.Module, dataset: ImageDataSet) -> str | None:
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
