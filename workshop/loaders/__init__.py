"""Ways to load samples (``--loader``), all with one interface: `workshop.loaders.sampler.Loader`.

The default, ``map``, is PyTorch's own ``DataLoader`` over a map-style data set; the train scripts build it themselves.
"""

from functools import partial
from typing import Any

import torch

from workshop.config import TrainConfig
from workshop.datasets import image_dataset
from workshop.datasets import shards as shard_files
from workshop.loaders.device import DeviceLoader
from workshop.loaders.images import ImageDataset
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler, Loader
from workshop.loaders.shards import ShardLoader, ShardSampler
from workshop.loaders.transform import BatchTransform

__all__ = ["DistributedBatchSampler", "ImageDataset", "Loader", "build_loader"]


def build_loader(
    config: TrainConfig, split: str, device: torch.device, rank: int = 0, world_size: int = 1
) -> BatchLoader:
    """Build the loader ``config.loader`` of a split of images: ``shards``, ``memory``, ``device`` or ``dali``.

    Args:
        config: names the data set, the loader and the samples per rank and step.
        split: ``"train"`` or ``"val"``.
        device: that computes.
        rank: of this process.
        world_size: number of ranks that share the samples.

    Raises:
        UserError: the data set or its shards are missing or damaged; a library is missing, or memory.
    """
    source = image_dataset(config.dataset)
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    pin_memory = config.pin_memory and device.type == "cuda"
    share: dict[str, Any] = {"rank": rank, "num_replicas": world_size, "shuffle": training, "seed": config.seed}
    transform_of = partial(BatchTransform, source.MEAN, source.STD, source.AUGMENT and training, seed=config.seed)

    if config.loader == "shards":
        samples = shard_files.check(config.dataset, config.data_dir)[split]
        paths = shard_files.shard_paths(config.dataset, config.data_dir, split)
        shard_sampler = ShardSampler(min(limit or samples, samples), config.batch_size, **share)
        transform = transform_of(samples=samples)
        return ShardLoader(paths, source.SAMPLE_SHAPE, shard_sampler, transform, config.num_workers, pin_memory)

    images, targets = (tensor[:limit] for tensor in source.arrays(config.data_dir, split))
    sampler = DistributedBatchSampler(len(images), config.batch_size, **share)
    transform = transform_of(samples=len(images))
    if config.loader == "memory":
        return MemoryLoader(images, targets, sampler, transform, pin_memory)
    if config.loader == "device":
        return DeviceLoader(images, targets, sampler, transform, device)
    assert config.loader == "dali", f"--loader {config.loader} is built by the script itself"
    from workshop.loaders.dali import DaliLoader  # here, because not every machine has DALI

    return DaliLoader(images, targets, sampler, transform, config.num_workers, device)
