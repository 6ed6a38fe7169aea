"""Synthetic color images of ten geometric objects, in place of CIFAR-10 where there is no network.

One object of random color, size, place and direction lies on a noisy background of uneven color. Neither the colors
nor any single pixel show which object it is, only its outline does, and its mirror image is the same object.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 32  # pixels along one side of an image
BATCH = 1000
TURN = 2 * math.pi  # radians


def generate_images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Generate random images.

    On one machine and one thread the result depends on ``seed`` alone, not on ``samples``: fewer samples are the first
    ones of more. Other versions of the libraries may give other pixels.

    Returns:
        Images (samples, 3, 32, 32) uint8, red, green, blue, and their labels (samples,) int64: positions in `NAMES`.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = [_generate_batch(generator) for _ in range(0, samples, BATCH)]
    images, labels = (torch.cat(parts)[:samples] for parts in zip(*batches, strict=True))
    return images, labels


# Each object by how far a point lies outside of it (inside: below 0). The object fills about the circle of radius 1
# around (0, 0); distances are exact where it matters, at the outline.


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 0.85


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.75).abs() - 0.2


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(torch.hypot(x, y) - 0.95, 0.7 - torch.hypot(x - 0.45, y))


def _box(x: Tensor, y: Tensor, width: float, height: float) -> Tensor:
    """A rectangle around (0, 0), by half its width and height."""
    return torch.maximum(x.abs() - width, y.abs() - height)


def _square(x: Tensor, y: Tensor) -> Tensor:
    return _box(x, y, 0.75, 0.75)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_box(x, y, 0.95, 0.27), _box(x, y, 0.27, 0.95))


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(-x, 0.5 * x + 0.75**0.5 * y.abs()) - 0.5


def _star(x: Tensor, y: Tensor) -> Tensor:
    # Folded along its lines of symmetry, a star of five points has one straight edge, from tip to notch.
    direction = (torch.atan2(y, x).remainder(TURN / 5) - TURN / 10).abs()
    radius = torch.hypot(x, y)
    x, y = radius * direction.cos(), radius * direction.sin()
    right, up = 1.05 * math.cos(TURN / 10) - 0.42, 1.05 * math.sin(TURN / 10)  # from the notch at (0.42, 0) to the tip
    return ((x - 0.42) * up - y * right) / math.hypot(right, up)


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    shaft = _box(x + 0.4, y, 0.6, 0.2)
    head = torch.maximum(0.05 - x, 0.6 * (x - 1) + 0.8 * y.abs())
    return torch.minimum(shaft, head)


def _wave(x: Tensor, width: float) -> Tensor:
    """How far x lies outside of bands of this width, one centered on 0, with gaps as wide between them."""
    return ((x / width + 1).remainder(2) - 1).abs() * width - width / 2


def _stripes(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(_wave(x, 0.32), _box(x, y, 0.8, 0.8))


def _checker(x: Tensor, y: Tensor) -> Tensor:
    across, along = _wave(x, 0.55), _wave(y, 0.55)
    both_or_neither = torch.minimum(torch.maximum(across, along), -torch.minimum(across, along))
    return torch.maximum(both_or_neither, _box(x, y, 0.825, 0.825))


OBJECTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": _disc,
    "ring": _ring,
    "crescent": _crescent,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
    "arrow": _arrow,
    "stripes": _stripes,
    "checker": _checker,
}
NAMES = tuple(OBJECTS)


def _generate_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generate ``BATCH`` images: (BATCH, 3, 32, 32) uint8 and labels (BATCH,) int64."""
    labels = torch.randint(len(OBJECTS), (BATCH,), generator=generator)
    ink = _ink(labels, generator)[:, None]
    ground = _rand(generator, 3, low=0.1, high=0.9)
    contrast = F.normalize(torch.randn(BATCH, 3, generator=generator)) * _rand(generator, 1, low=0.45, high=1.0)
    color = (ground + contrast)[:, :, None, None].clamp(0, 1) * _shade(generator, 0.25)
    image = ground[:, :, None, None] * _shade(generator, 0.4) + _blotches(generator)
    image = torch.lerp(image, color, ink)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    image += noise * _rand(generator, 1, low=0.0, high=0.1)[:, :, None, None]
    return (image.clamp(0, 1) * 255).round().to(torch.uint8), labels


def _rand(generator: torch.Generator, columns: int, low: float, high: float) -> Tensor:
    """Draw uniform random numbers for each image: (BATCH, columns)."""
    return low + (high - low) * torch.rand(BATCH, columns, generator=generator)


def _ink(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one object in each image; return how much of each pixel it covers, 0..1: (BATCH, 32, 32)."""
    radius = _rand(generator, 1, low=8, high=13)[:, :, None]  # pixels
    right, down = _rand(generator, 2, low=-4, high=4).T[:, :, None, None]
    turn = _rand(generator, 1, low=0, high=TURN)[:, :, None]
    pixel = torch.arange(SIZE) + 0.5 - SIZE / 2
    across, along = pixel - right, pixel[:, None] - down
    x = (turn.cos() * across + turn.sin() * along) / radius
    y = (turn.cos() * along - turn.sin() * across) / radius
    outside = torch.empty_like(x)
    for label, distance in enumerate(OBJECTS.values()):
        chosen = labels == label
        outside[chosen] = distance(x[chosen], y[chosen])
    return (0.5 - outside * radius).clamp(0, 1)


def _shade(generator: torch.Generator, strength: float) -> Tensor:
    """A factor that grows evenly across the image, in any direction: (BATCH, 1, 32, 32), around 1."""
    slope = _rand(generator, 2, low=-strength, high=strength)[:, :, None, None]
    position = torch.linspace(-1, 1, SIZE)
    return 1 + slope[:, :1] * position + slope[:, 1:] * position[:, None]


def _blotches(generator: torch.Generator) -> Tensor:
    """Smooth random deviations of the color: (BATCH, 3, 32, 32), around 0."""
    coarse = torch.randn(BATCH, 3, 6, 6, generator=generator) * _rand(generator, 1, low=0, high=0.1)[:, :, None, None]
    return F.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
