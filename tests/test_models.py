"""Every model maps the samples of its data set to what it says, and one that cannot is refused in one line."""

import pytest
import torch

from workshop.datasets import image_dataset
from workshop.errors import UserError
from workshop.models import build_model
from workshop.models.unet3d import UNet3D
from workshop.models.vit import build_vit


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
    """With all layers but the skip cut off, outputs still follow the inputs; with all of them, neighbours matter."""
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


# The vision transformer


@pytest.mark.parametrize(
    ("dataset", "patch", "inputs", "outputs"),
    [
        ("mnist", 7, (1, 28, 28), (10,)),
        ("cifar10", 8, (3, 32, 32), (10,)),
        ("nbody", 4, (4, 16, 16, 16), (5, 16, 16, 16)),
    ],
)
def test_the_transformer_maps_each_sample_by_itself(dataset: str, patch: int, inputs: tuple, outputs: tuple) -> None:
    assert_maps_each_sample_by_itself(build_vit(dataset, 16, patch, width=32, depth=2), inputs, outputs)


def test_every_patch_of_a_volume_depends_on_all_others_and_lies_where_it_was() -> None:
    """A change of one cell moves all others a little, by attention, and its own patch most, by the skip connection."""
    torch.manual_seed(0)
    model = build_vit("nbody", crop_size=8, patch=4, width=32, depth=2)
    volume = torch.randn(1, 4, 8, 8, 8)
    other = volume.clone()
    other[0, :, 1, 6, 2] += 1  # in the patch (0, 1, 0)
    with torch.no_grad():
        change = (model(other) - model(volume)).abs().sum(dim=1)[0]
    assert (change > 0).all()
    assert change[1, 6, 2] == change.max()


def test_the_weights_of_a_block_grow_with_the_square_of_the_width() -> None:
    with torch.device("meta"):
        weights = {
            (width, depth): count(build_vit("mnist", 0, 7, width, depth)) for width in (64, 2048) for depth in (1, 2, 5)
        }
    for width in (64, 2048):
        block = 12 * width**2 + 13 * width  # 3 + 1 + 4 + 4 matrices, their biases, two norms
        assert weights[width, 2] - weights[width, 1] == block
        assert weights[width, 5] - weights[width, 1] == 4 * block


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (64, 4), (512, 4), (768, 6), (1024, 8), (2048, 16)])
def test_heads_are_at_most_128_wide(width: int, heads: int) -> None:
    with torch.device("meta"):
        block = build_vit("mnist", 0, 7, width, depth=1).blocks[0]
    assert block.heads == heads and width // heads <= 128


@pytest.mark.parametrize(
    ("dataset", "patch", "width", "message"),
    [
        ("mnist", 5, 64, "--vit_patch 5 does not divide 28, the edge of the samples; 4 does"),
        ("nbody", 64, 64, "--vit_patch 64 does not divide 16, the edge of the samples; 16 does"),
        ("mnist", 7, 30, "--vit_width 30 is not a multiple of 4, the number of attention heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(dataset: str, patch: int, width: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        build_vit(dataset, 16, patch, width, 1)
    assert str(error.value) == message
