"""The 3D U-Net: its size, its shapes, and what it can learn."""

import pytest
import torch
import torch.nn.functional as F

from workshop.errors import UserError
from workshop.models import build_model
from workshop.models.unet3d import UNet3D


def test_at_full_width_it_has_117_million_parameters() -> None:
    with torch.device("meta"):
        model = UNet3D(width=64, depth=6)
        volumes = torch.empty(2, 4, 64, 64, 64)
    assert 116e6 < sum(weights.numel() for weights in model.parameters()) < 118e6
    assert model(volumes).shape == (2, 5, 64, 64, 64)
    channels = [layer.out_channels for layer in model.down]
    assert channels == [64, 128, 256, 512, 512, 512]


@pytest.mark.parametrize(("width", "depth", "shape"), [(3, 1, (2, 6, 4)), (2, 2, (4, 8, 12)), (1, 3, (8, 8, 8))])
def test_width_and_depth_are_free(width: int, depth: int, shape: tuple[int, ...]) -> None:
    model = UNet3D(width, depth)
    outputs = model(torch.randn(2, 4, *shape))
    assert outputs.shape == (2, 5, *shape)
    outputs.square().mean().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in model.parameters())


def test_skips_reach_every_level() -> None:
    """With the deepest layer cut off, outputs still follow the inputs; with all of them, neighbours matter."""
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


def test_outputs_have_either_sign_and_any_size() -> None:
    torch.manual_seed(0)
    model = UNet3D(width=8, depth=2)
    volumes, targets = torch.randn(4, 4, 8, 8, 8), torch.full((4, 5, 8, 8, 8), -3.0)
    targets[:, 0] = 5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = F.l1_loss(model(volumes), targets)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.l1_loss(model(volumes), targets)
        loss.backward()
        optimizer.step()
    assert loss < first / 5


def test_it_is_no_classifier_of_images() -> None:
    with pytest.raises(UserError, match="--model unet3d is unknown"):
        build_model("unet3d", "cifar10")
