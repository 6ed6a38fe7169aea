"""Small generated data in place of data sets and weights that would have to be downloaded.

A file that the doctor runs in each process before the script (``--preload``) imports this module. The images have the
shapes and the classes of the real ones. The environment variable SMALL_DATA sets the numbers of samples for training
and for validation, for example ``SMALL_DATA=40000,10000``; LARGEST_IMAGE sets the largest side of an image.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import functools
import os
import sys
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision import transforms

SIZES = tuple(int(size) for size in os.environ.get("SMALL_DATA", "2048,512").split(","))
LARGEST_IMAGE = int(os.environ.get("LARGEST_IMAGE", "32"))
SHAPES = {
    "MNIST": (10, (28, 28)),
    "FashionMNIST": (10, (28, 28)),
    "CIFAR10": (10, (32, 32, 3)),
    "CIFAR100": (100, (32, 32, 3)),
    "STL10": (10, (96, 96, 3)),
}
"""for each data set: number of classes, and shape of an image"""


class Generated(torchvision.datasets.VisionDataset):
    """Images with noise and a stripe whose place is the class, in place of those of torchvision."""

    shape: tuple[int, ...]
    number_of_classes: int

    def __init__(
        self,
        root: Any = None,
        train: Any = True,
        transform: Any = None,
        target_transform: Any = None,
        download: bool = False,
        split: str = "train",
        **_: object,
    ) -> None:
        super().__init__(str(root), transform=transform, target_transform=target_transform)
        self.train = train in (True, "train", "unlabeled", "train+unlabeled") and split != "test"
        size = SIZES[0] if self.train else SIZES[1]
        random = np.random.default_rng(1 - self.train)
        self.classes = [str(number) for number in range(self.number_of_classes)]
        targets = random.integers(0, self.number_of_classes, size)
        self.data = random.integers(0, 200, (size, *self.shape), dtype=np.uint8)
        self.data[np.arange(size), targets % self.shape[0]] = 255
        self.targets = targets.tolist()
        if len(self.shape) == 2:
            self.data, self.targets = torch.from_numpy(self.data), torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = Image.fromarray(np.asarray(self.data[index])), int(self.targets[index])
        image = self.transform(image) if self.transform else image
        return image, self.target_transform(target) if self.target_transform else target


class NoWeights(dict):
    """Stands for pretrained weights: a model that loads them stays as it was initialized."""


def replace_data() -> None:
    """Let the names of torchvision's data sets stand for generated ones."""
    for name, (classes, shape) in SHAPES.items():
        kind = type(name, (Generated,), {"shape": shape, "number_of_classes": classes, "__module__": __name__})
        module = sys.modules[getattr(torchvision.datasets, name).__module__]
        for place in (torchvision.datasets, module, sys.modules[__name__]):  # the last one, so that they can be pickled
            setattr(place, name, kind)


def replace_weights() -> None:
    """Let models stay as they are initialized, instead of downloading weights."""
    own = torch.nn.Module.load_state_dict

    @functools.wraps(own)
    def load(model: torch.nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(state, NoWeights) else own(model, state, *args, **kwargs)

    torch.nn.Module.load_state_dict = load  # type: ignore[method-assign]
    torchvision.models.WeightsEnum.get_state_dict = lambda *_, **__: NoWeights()
    torch.hub.load_state_dict_from_url = lambda *_, **__: NoWeights()


def make_images_small() -> None:
    """Let the usual crops and sizes of 224 or 256 be smaller, because the scripts run on few CPUs."""
    for kind in (transforms.RandomResizedCrop, transforms.CenterCrop, transforms.Resize, transforms.RandomCrop):
        own = kind.__init__

        @functools.wraps(own)
        def init(self: Any, size: Any, *args: Any, own: Any = own, **kwargs: Any) -> None:
            small = min(size, LARGEST_IMAGE) if isinstance(size, int) else [min(side, LARGEST_IMAGE) for side in size]
            own(self, small, *args, **kwargs)

        kind.__init__ = init


def make_models_small() -> None:
    """Let a ResNet have one block in each of its four layers."""
    module = sys.modules["torchvision.models.resnet"]
    own = module._resnet  # type: ignore[attr-defined]
    module._resnet = lambda block, layers, *rest, **kwargs: own(block, [1, 1, 1, 1], *rest, **kwargs)  # type: ignore[attr-defined]


def fork_workers() -> None:
    """Let loaders fork their workers in ranks of mp.spawn too: starting Python anew takes many seconds."""
    own = torch.utils.data.DataLoader.__init__

    @functools.wraps(own)
    def init(loader: torch.utils.data.DataLoader, *args: Any, **kwargs: Any) -> None:
        own(loader, *args, **kwargs)
        if loader.num_workers and not loader.multiprocessing_context:
            loader.multiprocessing_context = "fork"

    torch.utils.data.DataLoader.__init__ = init  # type: ignore[method-assign]


replace_data()
replace_weights()
fork_workers()
make_models_small()
make_images_small()
