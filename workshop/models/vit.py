"""A vision transformer: the image or the volume is cut into patches, and every patch attends to all others.

After Dosovitskiy et al. 2020 (https://arxiv.org/abs/2010.11929), with pre-norm blocks, learned positions, and the mean
over the patches in place of a class token. Because a patch is described by few numbers, almost all memory that it needs
in training is that of its weights, their gradients and the optimizer state.
"""

import torch
import torch.nn.functional as F
from torch import nn

from workshop.errors import UserError
from workshop.models.unet3d import IN_CHANNELS, OUT_CHANNELS


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input: (N, patches, width) -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, patches, width) to the same shape."""
        n, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, patches, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, patches, width / heads)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(n, patches, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build_vit(dataset: str, crop_size: int, patch: int, width: int, depth: int) -> "VisionTransformer":
    """Return a vision transformer with fresh weights for the samples of a data set.

    It has four attention heads, from a width of 640 on more: some of the fast attention kernels take heads of at most
    128 numbers.

    Args:
        dataset: mnist, cifar10, or nbody, whose volumes it maps to volumes as the U-Net does.
        crop_size: edge of a volume.
        patch: edge of a patch.
        width: numbers that describe a patch.
        depth: number of blocks.

    Raises:
        UserError: the patches do not fit the samples, or the heads do not fit the width.
    """
    size, channels = {"mnist": (28, 1), "cifar10": (32, 3), "nbody": (crop_size, IN_CHANNELS)}[dataset]
    if size % patch:
        fitting = max(edge for edge in range(1, min(patch, size) + 1) if size % edge == 0)
        raise UserError(f"--vit_patch {patch} does not divide {size}, the edge of the samples; {fitting} does")
    heads = max(4, width // 128)
    if width % heads:
        raise UserError(f"--vit_width {width} is not a multiple of {heads}, the number of attention heads")
    volumes = dataset == "nbody"
    return VisionTransformer(
        size=size,
        patch=patch,
        channels=channels,
        outputs=OUT_CHANNELS if volumes else 10,
        width=width,
        depth=depth,
        heads=heads,
        volumes=volumes,
    )


class VisionTransformer(nn.Module):
    """Classify images, (N, C, S, S) -> (N, outputs), or map volumes, (N, C, S, S, S) -> (N, outputs, S, S, S).

    Args:
        size: edge S of an image or a volume.
        patch: edge of a patch; must divide ``size``.
        channels: C.
        outputs: classes of an image, or channels of the volume that is returned.
        width: numbers that describe a patch; must be a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads in each block.
        volumes: whether it maps volumes.
    """

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        channels: int,
        outputs: int,
        width: int,
        depth: int,
        heads: int,
        volumes: bool,
    ) -> None:
        super().__init__()
        self.patch, self.outputs, self.grid = patch, outputs, size // patch
        convolution = nn.Conv3d if volumes else nn.Conv2d
        self.embed = convolution(channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, self.grid ** (3 if volumes else 2), width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs * patch**3 if volumes else outputs)
        self.skip = nn.Conv3d(channels, outputs, kernel_size=1) if volumes else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.embed(inputs).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))  # (N, patches, ...)
        if self.skip is None:
            return x.mean(dim=1)
        n, grid, patch = len(x), self.grid, self.patch
        x = x.view(n, grid, grid, grid, self.outputs, patch, patch, patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return x.reshape(n, self.outputs, *[grid * patch] * 3) + self.skip(inputs)
