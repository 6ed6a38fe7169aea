"""Loaders of volumes: cubes cut from boxes at random places, rotated and mirrored at random."""

from collections.abc import Iterable, Iterator
from itertools import permutations, product
from pathlib import Path

import h5py
import torch
from torch.utils.data import Dataset

from workshop.datasets import nbody
from workshop.errors import UserError
from workshop.loaders.ahead import one_ahead, stream_on, to_gpu
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler, epoch_generator

SYMMETRIES = list(product(permutations(range(3)), product((False, True), repeat=3)))
"""the 48 symmetries of the cube: for each new axis the old axis, and whether it is flipped; first, the identity"""


def cut(box: torch.Tensor | h5py.Dataset, corner: list[int], symmetry: int, size: int) -> torch.Tensor:
    """Cut a cube from a box, turned and mirrored; beyond its sides the box continues at the opposite side.

    Args:
        box: (C, n, n, n) float32, on any device or in a file; the channels `nbody.VELOCITY` hold the velocity.
        corner: where in the box the cube begins, three numbers in 0..n - 1.
        symmetry: index of `SYMMETRIES`.
        size: edge of the cube in cells.

    Returns: (C, size, size, size), on the device of the box.
    """
    axes, flips = SYMMETRIES[symmetry]
    cube = _slice_periodic(box, corner, size)
    cube = cube.permute(0, *(1 + axis for axis in axes)).flip([1 + axis for axis in range(3) if flips[axis]])
    # A flow to the right, in a box turned by 90 degrees, is a flow upwards: velocities turn with the volume.
    velocity = [-cube[1 + axis] if flip else cube[1 + axis] for axis, flip in zip(axes, flips, strict=True)]
    return torch.stack([cube[0], *velocity, *cube[4:]])


AXES = torch.tensor([axes for axes, _ in SYMMETRIES])
FLIPS = torch.tensor([flips for _, flips in SYMMETRIES])
"""of `SYMMETRIES`, (48, 3) each"""


def with_reversed(box: torch.Tensor) -> torch.Tensor:
    """Return a box (C, n, n, n) with three more channels, its velocities in the other direction, for `cut_batch`."""
    return torch.cat([box, -box[list(nbody.VELOCITY)]])


def cut_batch(
    boxes: Iterable[torch.Tensor], corners: torch.Tensor, symmetries: torch.Tensor, size: int
) -> list[torch.Tensor]:
    """Cut a batch of cubes from each of several boxes on a GPU, the same as `cut` does one by one.

    One kernel reads each value of the box once and writes it once; cubes that are cut one by one take thirty launches
    each. On a GPU both count: a launch costs the CPU some microseconds, with a batch of 64 more than the training of a
    small network; and while such a kernel runs, which fills the GPU, no kernel of the training does.

    Args:
        boxes: (C, n, n, n) each, from `with_reversed`, on one device.
        corners: (N, 3) int64 on the CPU, as for `cut`.
        symmetries: (N,) int64 on the CPU.
        size: edge of the cubes in cells.

    Returns: for each box (N, C - 3, size, size, size).
    """
    boxes = list(boxes)
    n, cells, device = len(corners), boxes[0].shape[-1], boxes[0].device
    axes, flips = AXES[symmetries], FLIPS[symmetries]  # (N, 3): for each new axis
    steps = torch.arange(size)
    # Which cell of the box is cell i of a new axis: counted along the old axis, from the other end if it is flipped.
    along = torch.where(flips[..., None], size - 1 - steps, steps)  # (N, 3, size)
    along = (corners.gather(1, axes)[..., None] + along) % cells
    strides = torch.tensor([cells**2, cells, 1])  # between neighbors on each old axis
    x, y, z = to_gpu(along * strides[axes][..., None], device).unbind(1)  # (N, size) each
    places = (x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]).flatten(1)
    first, velocity = nbody.VELOCITY[0], slice(nbody.VELOCITY[0], nbody.VELOCITY[-1] + 1)
    cubes = []
    for box in boxes:
        c = len(box) - len(nbody.VELOCITY)
        channels = torch.arange(c).repeat(n, 1)  # (N, C): from which channel of the box
        channels[:, velocity] = axes + torch.where(flips, c, first)  # velocities turn with the volume
        cube = box.flatten(1)[to_gpu(channels, device)[:, :, None], places[:, None]]
        cubes.append(cube.view(n, c, size, size, size))
    return cubes


def _slice_periodic(box: torch.Tensor | h5py.Dataset, corner: list[int], size: int) -> torch.Tensor:
    """Return a cube, (C, size, size, size), in up to eight pieces if it reaches over the sides of the box."""
    cells = box.shape[-1]
    device = box.device if isinstance(box, torch.Tensor) else None
    cube = torch.empty(len(box), size, size, size, device=device)
    pieces = []  # for each axis: where in the box, and where in the cube
    for start in corner:
        inside = min(size, cells - start)
        pieces.append([(slice(start, start + inside), slice(0, inside))])
        if inside < size:
            pieces[-1].append((slice(0, size - inside), slice(inside, size)))
    for piece in product(*pieces):
        source, target = zip(*piece, strict=True)
        cube[:, *target] = torch.as_tensor(box[:, *source])
    return cube


class VolumeDataset(Dataset):
    """Cubes cut from a box; as a map-style data set (``--loader map``) it reads them from the file one at a time.

    ``dataset[epoch, index]`` is a sample: inputs (4, c, c, c) and targets (5, c, c, c), both float32. Every epoch of
    the training split has ``crops`` other cubes of its box. Validation has the same cubes of the other box in every
    epoch and for every seed, as they lie in it.

    Args:
        data_dir: folder of all data sets.
        split: ``"train"`` or ``"val"``.
        crop_size: edge of the cubes in cells.
        crops: number of cubes in an epoch.
        limit: use this number of them only.
        seed: of places and symmetries.

    Raises:
        UserError: the box is missing or damaged, or smaller than the cubes.
    """

    def __init__(
        self, data_dir: Path, split: str, crop_size: int, crops: int, limit: int | None = None, seed: int = 0
    ) -> None:
        self.box = nbody.box(data_dir, split)
        if crop_size > self.box.cells:
            raise UserError(
                f"--crop_size {crop_size} is larger than the box in {self.box.path}, which has {self.box.cells} cells "
                "a side"
            )
        self.training = split == "train"
        self.size = crop_size
        self.crops = crops
        self.limit = limit
        self.seed = seed
        self._file: h5py.File | None = None
        self._epoch: int | None = None

    def places(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return corner (crops, 3) int64 and symmetry (crops,) int64 of each cube of an epoch; see `cut`.

        They depend only on the seed, the epoch, the cube's index and the number of cubes. So a cube is the same on any
        rank, in any worker and batch, and in a resumed run; and no two ranks see the same cube.
        """
        generator = epoch_generator(self.seed, epoch) if self.training else epoch_generator(0, 0)
        corners = self.box.cells if self.box.periodic else self.box.cells - self.size + 1
        chosen = torch.randint(corners, (self.crops, 3), generator=generator)
        symmetries = torch.randint(len(SYMMETRIES), (self.crops,), generator=generator)
        return chosen, symmetries if self.training else torch.zeros_like(symmetries)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        epoch, index = key
        if self._file is None:  # not earlier, because each worker process needs its own
            self._file = h5py.File(self.box.path)
        if self._epoch != epoch:
            self._epoch, (self._corners, self._symmetries) = epoch, self.places(epoch)
        corner, symmetry = self._corners[index].tolist(), int(self._symmetries[index])
        return tuple(cut(self._file[field], corner, symmetry, self.size) for field in nbody.CHANNELS)

    def __len__(self) -> int:
        return self.crops if self.limit is None else min(self.limit, self.crops)

    def check_values(self) -> None:
        """Read the whole box; raise `UserError` if it has values that are not finite numbers."""
        nbody.check_values(self.box)


class VolumeLoader(BatchLoader):
    """Batches (inputs, targets) cut from boxes in memory: of the CPU for ``memory``, of the GPU for ``device``."""

    batch_sampler: DistributedBatchSampler

    def __init__(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        dataset: VolumeDataset,
        batch_sampler: DistributedBatchSampler,
        pin_memory: bool = False,
    ) -> None:
        self.boxes = boxes
        if boxes[0].device.type == "cpu":
            self.less_work = "--loader device"
        else:
            self.with_reversed = [with_reversed(box) for box in boxes]
            self.boxes = tuple(whole[: len(box)] for whole, box in zip(self.with_reversed, boxes, strict=True))
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.pin_memory = pin_memory
        self.stream = stream_on(boxes[0].device)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        return self.cut_one_by_one() if self.stream is None else one_ahead(self.cut_at_once(), self.stream)

    def cut_at_once(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Cut each batch with few launches, as a GPU needs it."""
        corners, symmetries = self.dataset.places(self.batch_sampler.epoch)
        for indices in self.batch_sampler.batches():
            inputs, targets = cut_batch(self.with_reversed, corners[indices], symmetries[indices], self.dataset.size)
            yield inputs, targets

    def cut_one_by_one(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Cut cube by cube, as a CPU is fastest."""
        corners, symmetries = self.dataset.places(self.batch_sampler.epoch)
        for indices in self.batch_sampler.batches():
            places = list(zip(corners[indices].tolist(), symmetries[indices].tolist(), strict=True))
            inputs, targets = (
                torch.stack([cut(box, corner, symmetry, self.dataset.size) for corner, symmetry in places])
                for box in self.boxes
            )
            yield inputs, targets
