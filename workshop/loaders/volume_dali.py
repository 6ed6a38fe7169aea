"""``--loader dali`` for volumes: NVIDIA DALI's own threads cut the cubes; a GPU, if there is one, rotates them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from workshop.datasets.nbody import VELOCITY
from workshop.loaders.dali import Pipeline, PipelineLoader, fn, pipeline_def, types  # says so where DALI is missing
from workshop.loaders.sampler import DistributedBatchSampler
from workshop.loaders.volumes import SYMMETRIES, VolumeDataset


class VolumeDaliLoader(PipelineLoader):
    """Batches (inputs, targets) from a DALI pipeline, in GPU memory where there is a GPU.

    The pipeline gets the place and the symmetry of each cube, so its batches are those of the other loaders. DALI has
    no periodic boxes; therefore they are continued by the edge of a cube, which takes more memory.
    """

    def __init__(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        dataset: VolumeDataset,
        batch_sampler: DistributedBatchSampler,
        num_threads: int,
        device: torch.device,
    ) -> None:
        super().__init__(batch_sampler)
        beyond = [(0, dataset.size - 1 if dataset.box.periodic else 0)] * 3 + [(0, 0)]
        channels_last = [np.pad(box.permute(1, 2, 3, 0).numpy(), beyond, mode="wrap") for box in boxes]
        self.pipeline = _pipeline(
            partial(_batches_of_boxes, channels_last, batch_sampler),
            partial(_batches_of_places, dataset, batch_sampler),
            size=dataset.size,
            **self.options(num_threads, device),
        )


def _batches_of_boxes(
    boxes: list[np.ndarray], batch_sampler: DistributedBatchSampler
) -> Iterator[tuple[list[np.ndarray], ...]]:
    """Yield, for each batch, both boxes, once per cube."""
    for indices in batch_sampler.batches():
        yield tuple([box] * len(indices) for box in boxes)


def _batches_of_places(
    dataset: VolumeDataset, batch_sampler: DistributedBatchSampler
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield, for each batch, the corners, and the three matrices of `_matrices` for each cube."""
    corners, symmetries = dataset.places(batch_sampler.epoch)
    for indices in batch_sampler.batches():
        matrices = zip(*(_matrices(symmetry, dataset.size) for symmetry in symmetries[indices].tolist()), strict=True)
        yield corners[indices].int().numpy(), *map(np.stack, matrices)


def _matrices(symmetry: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how a symmetry acts on places and on values, all float32.

    Returns:
        (3, 4): an affine map from a place in the new cube to that in the old one, in the order x, y, z of DALI, which
        is from the last axis to the first. DALI's places are continuous, from 0 to ``size``, so a flip is ``size - x``.
        (4, 4) and (5, 5): linear maps from the old channels to the new ones.
    """
    places = np.zeros((3, 4), np.float32)
    inputs, targets = np.eye(4, dtype=np.float32), np.eye(5, dtype=np.float32)
    for new, (old, flip) in enumerate(zip(*SYMMETRIES[symmetry], strict=True)):
        sign = -1 if flip else 1
        places[2 - old, 2 - new] = sign
        places[2 - old, 3] = size if flip else 0
        for channels in (inputs, targets):
            channels[VELOCITY[new]] = sign * np.eye(len(channels))[VELOCITY[old]]
    return places, inputs, targets


@pipeline_def
def _pipeline(boxes: Any, places: Any, size: int, on_gpu: bool) -> tuple[Pipeline, ...]:  # noqa: ANN401
    # Boxes are passed on where they lie, not copied once per cube; that is safe, as they stay there.
    boxes = fn.external_source(source=boxes, num_outputs=2, cycle="raise", no_copy=True, layout="DHWC")
    corners, turns, *values_of = fn.external_source(source=places, num_outputs=4, cycle="raise")
    batch = []
    for box, values in zip(boxes, values_of, strict=True):
        cubes = fn.slice(box, start=corners, shape=[size] * 3, axis_names="DHW")
        if on_gpu:
            cubes = cubes.gpu()
        cubes = fn.warp_affine(cubes, matrix=turns, size=[size] * 3, interp_type=types.INTERP_NN)
        cubes = fn.coord_transform(cubes, M=values)
        batch.append(fn.transpose(cubes, perm=[3, 0, 1, 2]))
    return tuple(batch)
