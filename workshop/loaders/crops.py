"""Which cubes are cut from a box, and how each is turned or mirrored; its velocities turn with it."""

from itertools import permutations, product

import torch

from workshop.datasets.nbody import VELOCITY
from workshop.loaders.order import epoch_generator

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


INDICES_AT_ONCE = 2**25
"""values of a batch whose places in the box are in the memory of an accelerator at a time, in 4 bytes each"""


def cut(box: torch.Tensor, corners: torch.Tensor, symmetries: torch.Tensor, size: int) -> torch.Tensor:
    """Cut cubes from a box, turned and mirrored; beyond its sides the box continues at the opposite side.

    A symmetry permutes the axes and reverses some of them. Therefore the place of a value in the box is a sum of three
    terms, one for each axis of the cube. The first two and the channel are added in a small table, and one broadcast
    addition with the third makes the index of all channels, which one kernel then gathers.

    On a GPU this loader is limited by the bytes that its kernels move. For each value of the batch, 4 bytes are moved
    five and a half times: the index is written and read, the box is read, the batch is written, and then three of
    four or five channels are read and written again, for the sign of the velocity. For 64 pairs of cubes of 64^3
    cells, which have 151 million values, these are 3.2 GB. (An index of 8 bytes that is built anew for each channel
    takes twice as many. Three broadcast indices, ``box[channel, x, y, z]``, would take more still, as PyTorch's CUDA
    kernel wants each of them expanded to 8 bytes for every value.)

    Args:
        box: (C, n, n, n) float32, on any device; the channels `VELOCITY` hold the velocity.
        corners: (N, 3) int64 on the CPU: where in the box each cube begins.
        symmetries: (N,) int64 on the CPU.
        size: edge of the cubes in cells.

    Returns: (N, C, size, size, size) on the device of the box.
    """
    channels, cells = len(box), box.shape[-1]
    axes, flips = AXES[symmetries], FLIPS[symmetries]  # (N, 3)
    steps = torch.arange(size)
    steps = torch.where(flips[:, :, None], size - 1 - steps, steps)  # (N, 3, size), along the new axes
    strides = torch.tensor([cells**2, cells, 1])[axes]
    x, y, z = ((corners.gather(1, axes)[:, :, None] + steps) % cells * strides[:, :, None]).unbind(1)  # (N, size) each
    sources = torch.arange(channels).repeat(len(corners), 1)  # (N, C): where each new channel comes from
    sources[:, VELOCITY] = VELOCITY[0] + axes  # component i is the one along the old axis that is now axis i
    offsets = sources * cells**3
    # On the CPU only `take`, which wants 8 bytes, uses all cores. Elsewhere 4 bytes are less to write and read.
    accelerated = _is_accelerated(box)
    index_type = torch.int32 if accelerated and box.numel() <= torch.iinfo(torch.int32).max else torch.int64
    indices = (part.to(index_type) for part in (x[:, None] + offsets[..., None], y, z))
    parts = *indices, torch.where(flips, -1, 1)
    pinned = (part.pin_memory() for part in parts) if box.is_cuda else parts  # a GPU copies from there by itself
    x, y, z, signs = (part.to(box.device, non_blocking=True) for part in pinned)
    planes = x[..., None, None] + y[:, None, None, :, None]  # (N, C, size, size, 1)
    rows = z[:, None, None, None, :]  # (N, 1, 1, 1, size)
    batch = box.new_empty(len(corners), channels, size, size, size)
    if accelerated:
        cubes = max(1, INDICES_AT_ONCE // batch[:1].numel())
        for out, plane, row in zip(batch.split(cubes), planes.split(cubes), rows.split(cubes), strict=True):
            torch.index_select(box.view(-1), 0, (plane + row).view(-1), out=out.view(-1))
    else:
        for channel in range(channels):  # one at a time, so that the index takes little memory
            torch.take(box, planes[:, channel] + rows[:, 0], out=batch[:, channel])
    velocity = batch[:, VELOCITY[0] : VELOCITY[-1] + 1]
    velocity *= signs.to(box.dtype)[..., None, None, None]  # (with `batch[...] *=` Python would copy it onto itself)
    return batch


def _is_accelerated(box: torch.Tensor) -> bool:
    return box.device.type != "cpu"
