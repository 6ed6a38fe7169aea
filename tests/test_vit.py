"""The vision transformer: it classifies images and maps volumes, and sizes that do not fit are refused in one line."""

import pytest
import torch

from workshop.errors import UserError
from workshop.models.vit import build_vit


@pytest.mark.parametrize(
    ("dataset", "patch", "inputs", "outputs"),
    [
        ("mnist", 7, (1, 28, 28), (10,)),
        ("cifar10", 8, (3, 32, 32), (10,)),
        ("nbody", 4, (4, 16, 16, 16), (5, 16, 16, 16)),
    ],
)
def test_each_sample_is_mapped_by_itself(dataset: str, patch: int, inputs: tuple, outputs: tuple) -> None:
    model = build_vit(dataset, crop_size=16, patch=patch, width=32, depth=2)
    samples = torch.randn(3, *inputs)
    with torch.no_grad():
        mapped = model(samples)
        assert mapped.shape == (3, *outputs)
        torch.testing.assert_close(model(samples[1:2]), mapped[1:2], atol=1e-5, rtol=1e-4)


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
    def weights(width: int, depth: int) -> int:
        with torch.device("meta"):
            model = build_vit("mnist", 0, 7, width, depth)
        return sum(weight.numel() for weight in model.parameters())

    block = weights(64, 2) - weights(64, 1)
    assert block == 12 * 64**2 + 13 * 64  # 3 + 1 + 4 + 4 matrices, their biases, two norms
    assert weights(64, 5) == weights(64, 1) + 4 * block


@pytest.mark.parametrize(
    ("dataset", "patch", "width", "message"),
    [
        ("mnist", 5, 64, "--vit_patch 5 does not divide 28, the edge of the samples; 4 does"),
        ("nbody", 64, 64, "--vit_patch 64 does not divide 16, the edge of the samples; 16 does"),
        ("mnist", 7, 30, "--vit_width 30 is not a multiple of 4, the number of attention heads"),
    ],
)
def test_what_does_not_fit_is_refused(dataset: str, patch: int, width: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        build_vit(dataset, 16, patch, width, 1)
    assert str(error.value) == message
