"""The 3D U-Net that maps dark matter to gas: an encoder of strided convolutions, a decoder, and skip connections.

Its shape is that of the pix2pix generator (Isola et al. 2017, https://arxiv.org/abs/1611.07004) in three dimensions and
without batch norm, as in NERSC's tutorial "Deep Learning at Scale" (https://github.com/NERSC/sc22-dl-tutorial).
"""

import torch
from torch import nn

IN_CHANNELS, OUT_CHANNELS = 4, 5
"""density and velocity of the dark matter; density, velocity and temperature of the gas"""


class DeepestUp(nn.ConvTranspose3d):
    """The transposed convolution of the deepest volume, which may be a single cell.

    Its strides then fit every layout. With weights in channels_last, the code that PyTorch 2.15 compiles expects
    another layout of their gradient than cuDNN returns, and ends with an AssertionError. With contiguous weights both
    agree. (https://github.com/pytorch/pytorch/issues/197517 is a like case.)
    """

    def forward(self, volumes: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """See ``nn.ConvTranspose3d``; without ``output_size``."""
        assert output_size is None
        weight = self.weight.contiguous()
        return nn.functional.conv_transpose3d(volumes, weight, self.bias, self.stride, self.padding)


class UNet3D(nn.Module):
    """Map volumes (N, 4, D, H, W) to volumes (N, 5, D, H, W); 117 million parameters at width 64 and depth 6.

    Args:
        width: channels after the first layer; each deeper layer has twice as many, up to eight times the width.
        depth: how many times the edges are halved; D, H and W must be divisible by 2**depth.
    """

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        channels = [width * min(2**level, 8) for level in range(depth)]
        self.down = nn.ModuleList(
            nn.Conv3d(inner, outer, kernel_size=4, stride=2, padding=1)
            for inner, outer in zip([IN_CHANNELS, *channels], channels, strict=False)
        )
        self.up = nn.ModuleList(
            (DeepestUp if level == depth - 1 else nn.ConvTranspose3d)(
                # skip connections: all but the deepest also get the encoder's output of their size
                channels[level] * (1 if level == depth - 1 else 2),
                channels[level - 1] if level else OUT_CHANNELS,
                kernel_size=4,
                stride=2,
                padding=1,
            )
            for level in reversed(range(depth))
        )
        self.skip = nn.Conv3d(
            IN_CHANNELS, OUT_CHANNELS, kernel_size=1
        )  # a skip connection at full resolution, where gas resembles matter
        for layer in self.modules():
            if isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
                nn.init.normal_(layer.weight, std=0.02)  # as pix2pix does
                nn.init.zeros_(layer.bias)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        """Map volumes (N, 4, D, H, W) to (N, 5, D, H, W), of either sign."""
        x, halves = volumes, []
        for layer in self.down:
            x = nn.functional.leaky_relu(layer(x), 0.01)
            halves.append(x)
        x = self.up[0](halves.pop())
        for layer in self.up[1:]:
            x = layer(torch.cat([x.relu(), halves.pop()], dim=1))
        return x + self.skip(volumes)
