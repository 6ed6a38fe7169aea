"""The rungs of the data ladder for volumes: cubes cut from boxes at random, turned and mirrored at random."""

from collections.abc import Iterator
from itertools import product

import h5py
import torch
from torch.utils.data import Dataset

from workshop.config import VolumeFlags
from workshop.datasets import nbody
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError
from workshop.loaders.crops import Crops, cut
from workshop.loaders.device import require_room
from workshop.loaders.map import MapLoader
from workshop.loaders.order import EpochOrder, Loader


class VolumeLoader(Loader):
    """Batches (inputs, targets) cut from boxes in memory, on the device that the boxes are on.

    Rung ``memory`` has them in CPU memory, rung ``device`` on the accelerator.
    """

    def __init__(
        self, boxes: tuple[torch.Tensor, torch.Tensor], crops: Crops, sampler: EpochOrder, pin_memory: bool = False
    ) -> None:
        self.boxes = boxes
        self.crops = crops
        self.sampler = sampler
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        corners, symmetries = self.crops.of_epoch(self.sampler.epoch)
        for indices in self.sampler.batches():
            batch = tuple(cut(box, corners[indices], symmetries[indices], self.crops.size) for box in self.boxes)
            yield tuple(cubes.pin_memory() for cubes in batch) if self.pin_memory else batch


class CubesFromFile(Dataset):
    """Cubes read from the file one at a time, each by (epoch, index): (4, c, c, c) and (5, c, c, c) float32."""

    def __init__(self, box: nbody.Box, crops: Crops) -> None:
        self.box = box
        self.crops = crops
        self._file: h5py.File | None = None
        self._drawn: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        epoch, index = epoch_and_index
        if self._file is None:  # not earlier: each worker process needs its own
            self._file = h5py.File(self.box.path)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self.crops.of_epoch(epoch)
        corners, symmetries = self._drawn[1]
        cubes = [read_cube(self._file[field], corners[index].tolist(), self.crops.size) for field in nbody.CHANNELS]
        origin = torch.zeros(1, 3, dtype=torch.int64)
        return tuple(cut(cube, origin, symmetries[index, None], self.crops.size)[0] for cube in cubes)


def read_cube(field: h5py.Dataset, corner: list[int], size: int) -> torch.Tensor:
    """Read a cube, (C, size, size, size), from a box in a file, in up to eight pieces if it reaches over the sides."""
    cells = field.shape[-1]
    cube = torch.empty(len(field), size, size, size)
    pieces = []
    for start in corner:
        inside = min(size, cells - start)
        pieces.append([(slice(start, start + inside), slice(0, inside))])
        if inside < size:
            pieces[-1].append((slice(0, size - inside), slice(inside, size)))
    for piece in product(*pieces):
        source, target = ((slice(None), *slices) for slices in zip(*piece, strict=True))
        field.read_direct(cube.numpy(), source, target)
    return cube


def build_volume_loader(
    config: VolumeFlags, device: torch.device, ranks: Ranks, split: str, limit: int | None
) -> "VolumeLoader | MapLoader":
    """Build the loader of a split on the rung ``config.loader``.

    An epoch has ``config.train_crops`` cubes of the training box, others each time; validation has
    ``config.val_crops`` of the other box, the same ones every time and whatever the seed, as they lie in it.

    Raises UserError: as `build_loaders`, or the cubes are larger than the box, or there are no such shards.
    """
    box = nbody.box(config.data_dir, split)
    if config.crop_size > box.cells:
        raise UserError(
            f"--crop_size {config.crop_size} is larger than the box in {box.path}, which has {box.cells} cells a side"
        )
    training = split == "train"
    samples = config.train_crops if training else config.val_crops
    seed = config.seed if training else 0
    crops = Crops(samples, box.cells, config.crop_size, box.periodic, seed, fixed=not training)
    order = EpochOrder(min(limit or samples, samples), config.batch_size, ranks, config.seed, shuffle=training)
    pin_memory = config.pin_memory and device.type == "cuda"
    if config.loader == "map":
        if ranks.is_main:  # where the whole box is read anyway, each rank sees for itself
            nbody.check_values(box.path)
        return MapLoader(
            CubesFromFile(box, crops),
            order,
            config.num_workers,
            pin_memory,
            config.persistent_workers,
            config.prefetch_factor,
        )
    if config.loader == "shards":
        raise UserError("--loader shards has no volumes; --loader map, memory, device or dali has")
    where = device if config.loader == "device" else torch.device("cpu")
    _check_room(config, box, where)
    boxes = nbody.arrays(config.data_dir, split, where)
    if config.loader == "dali":
        from workshop.loaders.volume_dali import VolumeDaliLoader  # needs DALI

        return VolumeDaliLoader(boxes, crops, order, box.periodic, config.num_workers, device)
    return VolumeLoader(boxes, crops, order, pin_memory and config.loader == "memory")


def _check_room(config: VolumeFlags, box: nbody.Box, device: torch.device) -> None:
    """Raise `UserError` unless both fields of the box fit on ``device``, and what reads them into the CPU's memory."""
    cells = box.cells**3
    if config.loader == "dali":  # makes a copy, and continues it if it is periodic
        cells += (box.cells + (config.crop_size - 1) * box.periodic) ** 3
    other = "memory" if config.loader == "device" else "map"
    needed, cpu, what = 4 * sum(nbody.CHANNELS.values()) * cells, torch.device("cpu"), f" for {box.path}"
    require_room(config.loader, needed, device, f"use --loader {other}", what)
    reading = 2 * 4 * box.cells**3  # a channel at a time, which is looked through for what is no number
    require_room(config.loader, reading + needed * (device == cpu), cpu, "use --loader map", what)
