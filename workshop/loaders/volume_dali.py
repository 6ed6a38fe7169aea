"""``--loader dali`` for volumes: NVIDIA DALI's own threads cut the cubes; a GPU, if there is one, rotates them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from workshop.datasets.nbody import VELOCITY
from workshop.loaders.crops import AXES, FLIPS, Crops
from workshop.loaders.dali import Pipeline, PipelineLoader, fn, pipeline_def, types  # says so where DALI is missing
from workshop.loaders.sampler import DistributedBatchSampler


class VolumeDaliLoader(PipelineLoader):
    """Batches (inputs, targets) from a DALI pipeline, in GPU memory where there is a GPU.

    The pipeline gets the place and the symmetry of each cube, so its batches are those of the other loaders. DALI has
    no periodic boxes; therefore they are continued by the edge of a cube, which takes more memory.
    """

    def __init__(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        crops: Crops,
        batch_sampler: DistributedBatchSampler,
        periodic: bool,
        num_threads: int,
        device: torch.device,
    ) -> None:
        super().__init__(range(batch_sampler.num_samples), batch_sampler)
        beyond = crops.size - 1 if periodic else 0
        self.pipeline = _pipeline(
            partial(_batches_of_boxes, [_channels_last(box, beyond) for box in boxes], batch_sampler),
            partial(_batches_of_orders, crops, batch_sampler),
            size=crops.size,
            **self.options(num_threads, device),
        )


def _batches_of_boxes(
    boxes: list[np.ndarray], batch_sampler: DistributedBatchSampler
) -> Iterator[tuple[list[np.ndarray], ...]]:
    """Yield, for each batch, both boxes, once per cube."""
    for indices in batch_sampler.batches():
        yield tuple([box] * len(indices) for box in boxes)


def _batches_of_orders(crops: Crops, batch_sampler: DistributedBatchSampler) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield, for each batch, the corners and what `_matrices` returns."""
    corners, symmetries = crops.of_epoch(batch_sampler.epoch)
    for indices in batch_sampler.batches():
        yield corners[indices].int().numpy(), *_matrices(symmetries[indices], crops.size)


def _channels_last(box: torch.Tensor, beyond: int) -> np.ndarray:
    """Return a box as DALI wants it, (n, n, n, C), and continued periodically by some cells."""
    return np.pad(box.permute(1, 2, 3, 0).numpy(), [(0, beyond)] * 3 + [(0, 0)], mode="wrap")


def _matrices(symmetries: torch.Tensor, size: int) -> tuple[np.ndarray, ...]:
    """Return how the symmetries act on places and on values.

    Returns:
        (N, 3, 4) float32, affine maps from a place in the new cube to that in the old one, in the order x, y, z of
        DALI, which is from the last axis to the first; and (N, 4, 4) and (N, 5, 5) float32, linear maps from the old
        channels to the new ones.
    """
    axes, flips = AXES[symmetries], FLIPS[symmetries]
    signs = torch.where(flips, -1.0, 1.0)
    turns = torch.nn.functional.one_hot(axes, 3) * signs[:, :, None]  # new axis, old axis
    shifts = torch.zeros(len(axes), 3).scatter_(1, axes, size * flips.float())
    places = torch.cat([turns.transpose(1, 2).flip(1, 2), shifts.flip(1)[:, :, None]], dim=2)
    values = [torch.eye(channels).repeat(len(axes), 1, 1) for channels in (4, 5)]
    first, last = VELOCITY[0], VELOCITY[-1] + 1
    for matrix in values:
        matrix[:, first:last, first:last] = turns
    return tuple(matrix.contiguous().numpy() for matrix in (places, *values))


@pipeline_def
def _pipeline(boxes: Any, orders: Any, size: int, on_gpu: bool) -> tuple[Pipeline, ...]:  # noqa: ANN401
    # Boxes are passed on where they lie, not copied once per cube; that is safe, as they stay there.
    boxes = fn.external_source(source=boxes, num_outputs=2, cycle="raise", no_copy=True, layout="DHWC")
    corners, places, *values_of = fn.external_source(source=orders, num_outputs=4, cycle="raise")
    batch = []
    for box, values in zip(boxes, values_of, strict=True):
        cubes = fn.slice(box, start=corners, shape=[size] * 3, axis_names="DHW")
        if on_gpu:
            cubes = cubes.gpu()
        cubes = fn.warp_affine(cubes, matrix=places, size=[size] * 3, interp_type=types.INTERP_NN)
        cubes = fn.coord_transform(cubes, M=values)
        batch.append(fn.transpose(cubes, perm=[3, 0, 1, 2]))
    return tuple(batch)
