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
from workshop.models.unet3d import UNet3D
from workshop.volumes import VolumeConfig

MODELS: dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN, "cifar_cnn": CifarCNN}
"""The workshop's own classifiers; each is made for the samples of one data set."""
VOLUME_MODEL = "unet3d"
"""the one that maps volumes to volumes"""


def build_model(config: TrainConfig) -> nn.Module:
    """Build ``config.model`` with fresh weights, for the samples of ``config.dataset``.

    Besides `MODELS`, any classifier that torchvision registers can be had by its name, such as ``resnet152``; and the
    U-Net for volumes.

    Raises:
        UserError: no model has that name, or it does not fit the data set.
    """
    if config.dataset == "nbody" or config.model == VOLUME_MODEL:
        return _build_unet(config)
    dataset = DATASETS[config.dataset]
    theirs = torchvision.models.list_models(module=torchvision.models)
    if config.model in MODELS:
        model = MODELS[config.model]()
    elif config.model in theirs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # on initial weights that will change, of some models
            model = torchvision.models.get_model(config.model, weights=None, num_classes=dataset.NUM_CLASSES)
    else:
        raise UserError(f"--model {config.model} is unknown; {nearest(config.model, [*MODELS, VOLUME_MODEL, *theirs])}")
    if misfit := _misfit(model, dataset):
        fitting = " or ".join(name for name, build in MODELS.items() if not _misfit(build(), dataset))
        shape = "x".join(map(str, dataset.SAMPLE_SHAPE))
        raise UserError(
            f"--model {config.model} does not fit the {shape} samples of --dataset {config.dataset} ({misfit}); "
            f"--model {fitting} does"
        )
    return model


def _build_unet(config: TrainConfig) -> nn.Module:
    if config.model != VOLUME_MODEL:
        raise UserError(f"--dataset nbody holds volumes, and only --model {VOLUME_MODEL} maps volumes to volumes")
    if config.dataset != "nbody":
        raise UserError(
            f"--model {VOLUME_MODEL} maps volumes to volumes: it needs --dataset nbody, not {config.dataset}"
        )
    assert isinstance(config, VolumeConfig), "only lessons with flags for volumes know the data set nbody"
    if config.crop_size % 2**config.depth:
        halvings = (config.crop_size & -config.crop_size).bit_length() - 1
        near = max(round(config.crop_size / 2**config.depth), 1) * 2**config.depth
        raise UserError(
            f"--crop_size {config.crop_size} cannot be halved {config.depth} times; take --crop_size {near}"
            + (f", or --depth {halvings}" if halvings else "")
        )
    return UNet3D(config.width, config.depth)


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
