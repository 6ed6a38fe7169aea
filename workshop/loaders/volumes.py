"""Loaders of volumes: cubes cut from boxes at random places, rotated and mirrored at random."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import h5py
import torch
from torch.utils.data import Dataset

from workshop.datasets import nbody
from workshop.errors import UserError
from workshop.hardware import require_memory
from workshop.loaders.crops import Crops, cut
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler


class VolumeDataset(Dataset):
    """Cubes read from the file one at a time, the map-style data set of ``--loader map``.

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
        self.limit = crops if limit is None else limit
        training = split == "train"
        self.crops = Crops(
            crops, self.box.cells, crop_size, self.box.periodic, seed if training else 0, fixed=not training
        )
        self._file: h5py.File | None = None
        self._chosen: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        epoch, index = key
        if self._file is None:  # not earlier, because each worker process needs its own
            self._file = h5py.File(self.box.path)
        if self._chosen is None or self._chosen[0] != epoch:
            self._chosen = epoch, self.crops.of_epoch(epoch)
        corners, symmetries = self._chosen[1]
        cubes = [read_cube(self._file[field], corners[index].tolist(), self.crops.size) for field in nbody.CHANNELS]
        origin = torch.zeros(1, 3, dtype=torch.int64)
        return tuple(cut(cube, origin, symmetries[index, None], self.crops.size)[0] for cube in cubes)

    def __len__(self) -> int:
        return min(self.limit, self.crops.samples)

    def check_values(self) -> None:
        """Read the whole box; raise `UserError` if it has values that are not finite numbers."""
        nbody.check_values(self.box.path)


class VolumeLoader(BatchLoader):
    """Batches (inputs, targets) cut from boxes in memory, on the device that the boxes are on.

    ``--loader memory`` has them in CPU memory, ``--loader device`` in GPU memory.
    """

    def __init__(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        crops: Crops,
        batch_sampler: DistributedBatchSampler,
        pin_memory: bool = False,
    ) -> None:
        self.boxes = boxes
        self.crops = crops
        self.dataset = range(batch_sampler.num_samples)
        self.batch_sampler = batch_sampler
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        corners, symmetries = self.crops.of_epoch(self.batch_sampler.epoch)
        for indices in self.batch_sampler.batches():
            inputs, targets = (cut(box, corners[indices], symmetries[indices], self.crops.size) for box in self.boxes)
            yield (inputs.pin_memory(), targets.pin_memory()) if self.pin_memory else (inputs, targets)


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
    loader: str,
    dataset: VolumeDataset,
    batch_sampler: DistributedBatchSampler,
    device: torch.device,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> BatchLoader:
    """Build the loader ``memory``, ``device`` or ``dali`` of volumes.

    Args:
        loader: as ``--loader``; ``map`` is PyTorch's own ``DataLoader``, which the train scripts build themselves.
        dataset: says which cubes of which box.
        batch_sampler: says which of them make up each batch.
        device: that computes.
        num_workers: threads of DALI.
        pin_memory: with ``memory``, put batches into memory that a GPU can copy from directly.

    Raises:
        UserError: there are no such shards, a library is missing, or the box does not fit into memory.
    """
    if loader == "shards":
        raise UserError("--loader shards has no volumes; --loader map, memory, device or dali has")
    box, crops = dataset.box, dataset.crops
    where = device if loader == "device" else torch.device("cpu")
    _check_memory(loader, box, crops.size, where)
    boxes = nbody.read_arrays(box.path, where)
    if loader == "dali":
        from workshop.loaders.volume_dali import VolumeDaliLoader  # needs DALI

        return VolumeDaliLoader(boxes, crops, batch_sampler, box.periodic, num_workers, device)
    return VolumeLoader(boxes, crops, batch_sampler, pin_memory and loader == "memory" and device.type == "cuda")


def _check_memory(loader: str, box: nbody.Box, crop_size: int, device: torch.device) -> None:
    """Raise `UserError` unless both fields of the box fit on ``device``, and what reads them into CPU memory."""
    cells = box.cells**3
    if loader == "dali":  # makes a copy, and continues it if it is periodic
        cells += (box.cells + (crop_size - 1) * box.periodic) ** 3
    other = "memory" if loader == "device" else "map"
    needed, cpu, what = 4 * sum(nbody.CHANNELS.values()) * cells, torch.device("cpu"), f" for {box.path}"
    require_memory(loader, needed, device, f"use --loader {other}", what)
    reading = 2 * 4 * box.cells**3  # one channel at a time, and the search for values that are not finite
    require_memory(loader, reading + needed * (device == cpu), cpu, "use --loader map", what)
