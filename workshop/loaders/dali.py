"""``--loader dali``: NVIDIA DALI's threads augment and normalize, on a GPU if there is one, otherwise on the CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from workshop.errors import UserError
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.loaders.transform import PADDING, BatchTransform

try:
    from nvidia.dali import Pipeline, fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator
except ImportError:
    raise UserError("--loader dali needs NVIDIA DALI (Linux only): pip install nvidia-dali-cuda120") from None


class PipelineLoader(BatchLoader):
    """Batches (inputs, targets) from a DALI pipeline that begins an epoch whenever it is iterated over.

    The caller feeds the ``pipeline`` from a generator that reads the sampler's epoch when an epoch begins. The
    generator must not refer to the loader: that would make a reference cycle, which only the garbage collector frees.
    If the collector ran in a forked process, it would wait for ever for the pipeline's threads, which exist only in the
    original process.
    """

    less_work = "--loader device"
    can_have_workers = True
    always_threaded = True
    pipeline: Pipeline
    batch_sampler: DistributedBatchSampler

    def __init__(self, batch_sampler: DistributedBatchSampler) -> None:
        self.dataset = range(batch_sampler.num_samples)
        self.batch_sampler = batch_sampler
        self._iterator: DALIGenericIterator | None = None

    def options(self, num_threads: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments that every pipeline needs: where it works, and on how many samples and threads."""
        on_gpu, batch_size = device.type == "cuda", self.batch_sampler.batch_size
        device_id = (device.index or 0) if on_gpu else None
        return {"on_gpu": on_gpu, "batch_size": batch_size, "num_threads": max(num_threads, 1), "device_id": device_id}

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        if self._iterator is None:  # not earlier: it reads ahead, and must know the epoch by then
            self._iterator = DALIGenericIterator(
                self.pipeline,
                ["inputs", "targets"],
                last_batch_policy=LastBatchPolicy.PARTIAL,
                prepare_first_batch=False,
            )
        else:
            for _ in self._iterator:  # the rest of an epoch that was interrupted
                pass
            self._iterator.reset()
        for (batch,) in self._iterator:
            yield batch["inputs"], batch["targets"]


class DaliLoader(PipelineLoader):
    """Batches (inputs, targets) from a DALI pipeline, in GPU memory where there is a GPU.

    The pipeline gets bytes in the order of the sampler, and for each image how to flip and shift it. So its batches are
    those of the other loaders.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        batch_sampler: DistributedBatchSampler,
        transform: BatchTransform,
        num_threads: int,
        device: torch.device,
    ) -> None:
        super().__init__(batch_sampler)
        images = images.permute(0, 2, 3, 1).contiguous()  # DALI wants the channels last
        self.pipeline = _pipeline(
            partial(_batches_of_bytes, images, targets, batch_sampler, transform),
            image_size=list(images.shape[1:3]),
            mean=(255 * transform.mean).flatten().tolist(),
            std=(255 * transform.std).flatten().tolist(),
            **self.options(num_threads, device),
        )


def _batches_of_bytes(
    images: torch.Tensor, targets: torch.Tensor, batch_sampler: DistributedBatchSampler, transform: BatchTransform
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield, for each batch of an epoch, images (N, H, W, C), where to cut them, whether to flip them, and targets."""
    transform.set_epoch(batch_sampler.epoch)
    for indices in batch_sampler.batches():
        flips = transform.flips[indices] & transform.augment
        starts = (transform.shifts[indices] - PADDING) * transform.augment
        yield tuple(array.numpy() for array in (images[indices], starts.int(), flips.int(), targets[indices]))


@pipeline_def
def _pipeline(
    source: object, image_size: list[int], mean: list[float], std: list[float], on_gpu: bool
) -> tuple[Pipeline, Pipeline]:
    images, starts, flips, targets = fn.external_source(
        source=source, num_outputs=4, batch=True, cycle="raise", layout=["HWC", "", "", ""]
    )
    if on_gpu:
        images, targets = images.gpu(), targets.gpu()
    images = fn.slice(
        images, start=starts, shape=image_size, axis_names="HW", out_of_bounds_policy="pad", fill_values=0
    )
    images = fn.crop_mirror_normalize(images, mirror=flips, mean=mean, std=std, output_layout="CHW", dtype=types.FLOAT)
    return images, targets
