"""Every model maps the samples of its data set to what it says, and one that cannot is refused in one line."""

import pytest
import torch

from workshop.datasets import image_dataset
from workshop.errors import UserError
from workshop.models import build_model
from workshop.models.unet3d import UNet3D


def assert_maps_each_sample_by_itself(model: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
    samples = torch.randn(3, *inputs)
    with torch.inference_mode():
        mapped = model.eval()(samples)
        assert mapped.shape == (3, *outputs)
        torch.testing.assert_close(model(samples[1:2]), mapped[1:2], atol=1e-4, rtol=1e-4)


def count(model: torch.nn.Module) -> int:
    return sum(weights.numel() for weights in model.parameters())


# Classifiers


@pytest.mark.parametrize(
    ("dataset", "model", "size"),
    [
        ("mnist", "mnist_cnn", 1_199_882),
        ("cifar10", "cifar_cnn", 62_006),
        ("cifar10", "resnet18", 11_181_642),
        ("cifar10", "densenet121", 6_964_106),
    ],
)
def test_scores_of_each_sample(dataset: str, model: str, size: int) -> None:
    built = build_model(model, dataset)
    assert count(built) == size
    assert_maps_each_sample_by_itself(built, image_dataset(dataset).SAMPLE_SHAPE, (10,))


def test_checking_the_fit_changes_neither_model_nor_random_numbers() -> None:
    torch.manual_seed(3)
    model = build_model("resnet18", "cifar10")
    after = torch.rand(1)
    assert model.bn1.num_batches_tracked == 0 and model.training
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    torch.manual_seed(3)
    build_model("resnet18", "cifar10")
    assert torch.rand(1) == after


def test_without_dropout_a_model_in_training_uses_no_random_numbers() -> None:
    images = torch.randn(4, 1, 28, 28)
    with_dropout, without = (build_model("mnist_cnn", "mnist", dropout=dropout).train() for dropout in (True, False))
    state = torch.get_rng_state()
    assert torch.equal(without(images), without(images))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(with_dropout(images), with_dropout(images))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dataset", "model", "message"),
    [
        ("cifar10", "mnist_cnn", "does not fit --dataset cifar10 .*; --model cifar_cnn does"),
        ("mnist", "resnet18", "does not fit --dataset mnist .*; --model mnist_cnn does"),
        ("cifar10", "vit_b_32", r"does not fit .*Expected 224 but got 32"),
        ("cifar10", "googlenet", r"does not fit "),
        ("cifar10", "resnet81", "--model resnet81 is unknown; did you mean resnet18?"),
        ("cifar10", "cifar_cn", "--model cifar_cn is unknown; did you mean cifar_cnn?"),
        ("cifar10", "unet3d", "--model unet3d is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(dataset: str, model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(model, dataset)


# The U-Net


def test_at_full_width_the_unet_has_117_million_parameters() -> None:
    with torch.device("meta"):
        model = UNet3D(width=64, depth=6)
        assert model(torch.empty(2, 4, 64, 64, 64)).shape == (2, 5, 64, 64, 64)
    assert 116e6 < count(model) < 118e6


@pytest.mark.parametrize(("width", "depth", "shape"), [(3, 1, (2, 6, 4)), (2, 2, (4, 8, 12)), (1, 3, (8, 8, 8))])
def test_every_weight_of_the_unet_is_trained(width: int, depth: int, shape: tuple[int, ...]) -> None:
    model = UNet3D(width, depth)
    assert_maps_each_sample_by_itself(model, (4, *shape), (5, *shape))
    model(torch.randn(2, 4, *shape)).square().mean().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in model.parameters())


def test_skips_of_the_unet_reach_every_level() -> None:
    """With all layers but the skip cut off, outputs still follow the inputs; with all of them, neighbors matter."""
    torch.manual_seed(0)
    model = UNet3D(width=2, depth=2)
    volumes = torch.zeros(1, 4, 8, 8, 8)
    moved = volumes.clone()
    moved[0, 0, 4, 4, 4] = 1

    def change() -> torch.Tensor:
        return (model(moved) - model(volumes)).abs().sum(dim=(0, 1)) > 0

    assert change().sum() > 1
    with torch.no_grad():
        for layer in (*model.down, *model.up):
            layer.weight.zero_()
    assert change().nonzero().tolist() == [[4, 4, 4]]
