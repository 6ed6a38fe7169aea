"""Which cubes are cut from a box, and how each is turned or mirrored; its velocities turn with it."""

from itertools import permutations, product

import torch

from workshop.datasets.nbody import VELOCITY
from workshop.loaders.sampler import epoch_generator

_ALL = list(product(permutations(range(3)), product((False, True), repeat=3)))
AXES = torch.tensor([axes for axes, _ in _ALL])
"""(48, 3) int64: for each symmetry of the cube, which old axis each new axis is; the first one changes nothing"""
FLIPS = torch.tensor([flips for _, flips in _ALL])
"""(48, 3) bool: and whether that new axis then runs the other way"""


class Crops:
    """The corner and the symmetry of every cube of an epoch.

    They follow from the seed, the epoch and the cube's index alone, so it does not matter which rank, worker or batch
    it turns up in, no two ranks see the same ones, and a resumed run sees what it would have seen.
    """

    def __init__(self, samples: int, cells: int, size: int, periodic: bool, seed: int, fixed: bool = False) -> None:
        self.samples = samples
        self.size = size
        self.corners = cells if periodic else cells - size + 1
        self.seed = seed
        self.fixed = fixed
        """every epoch has the same cubes, as they lie in the box"""

    def of_epoch(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the corners, (samples, 3) int64, and the symmetries, (samples,) int64: rows of `AXES` and `FLIPS`."""
        generator = epoch_generator(self.seed, 0 if self.fixed else epoch)
        corners = torch.randint(self.corners, (self.samples, 3), generator=generator)
        symmetries = torch.randint(len(AXES), (self.samples,), generator=generator)
        return corners, torch.zeros_like(symmetries) if self.fixed else symmetries


def cut(box: torch.Tensor, corners: torch.Tensor, symmetries: torch.Tensor, size: int) -> torch.Tensor:
    """Cut cubes from a box, turned and mirrored; beyond its sides the box goes on at the other side.

    Each channel is gathered for the whole batch at once, so a GPU is given some 20 kernels however many cubes there
    are, and what they mostly move is the batch and the position in the box, in 8 bytes, of each of its values.

    Args:
        box: (C, n, n, n), on any device; the channels `VELOCITY` hold the velocity.
        corners: (N, 3) int64 on the CPU: where in the box each cube begins.
        symmetries: (N,) int64 on the CPU.
        size: edge of the cubes in cells.

    Returns: (N, C, size, size, size) on the device of the box.
    """
    cells = box.shape[-1]
    axes, flips = AXES[symmetries], FLIPS[symmetries]  # (N, 3)
    steps = torch.arange(size)
    steps = torch.where(flips[:, :, None], size - 1 - steps, steps)  # (N, 3, size), along the new axes
    strides = torch.tensor([cells**2, cells, 1])[axes]
    positions = (corners.gather(1, axes)[:, :, None] + steps) % cells * strides[:, :, None]
    sources = torch.arange(len(box)).repeat(len(corners), 1)  # (N, C): where each new channel comes from
    sources[:, VELOCITY] = VELOCITY[0] + axes  # component i is the one along the old axis that is now axis i
    parts = positions, sources * cells**3, torch.where(flips, -1, 1).to(box.dtype)
    pinned = (part.pin_memory() for part in parts) if box.is_cuda else parts  # a GPU copies from there by itself
    positions, offsets, signs = (part.to(box.device, non_blocking=True) for part in pinned)
    x, y, z = positions.unbind(1)
    position = x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]  # (N, size, size, size)
    batch = box.new_empty(len(corners), len(box), size, size, size)
    for channel in range(len(box)):
        torch.take(box, position + offsets[:, channel, None, None, None], out=batch[:, channel])
    batch[:, VELOCITY[0] : VELOCITY[-1] + 1] *= signs[:, :, None, None, None]
    return batch
