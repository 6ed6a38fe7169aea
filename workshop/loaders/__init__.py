"""Ways to load samples (``--loader``), all with one interface: `workshop.loaders.sampler.Loader`.

The default, ``map``, is PyTorch's own ``DataLoader`` over a map-style data set; the train scripts build it themselves.
"""

from functools import partial
from typing import Any

import torch

from workshop.config import TrainConfig
from workshop.hardware import require_memory
from workshop.loaders.images import ImageDataset
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler, Loader

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
    from workshop.datasets import image_dataset

    source = image_dataset(config.dataset)
    source.check(config.data_dir)
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    pin_memory = config.pin_memory and device.type == "cuda"
    sampler: Any = partial(
        DistributedBatchSampler,
        batch_size=config.batch_size,
        rank=rank,
        num_replicas=world_size,
        shuffle=training,
        seed=config.seed,
    )

    from workshop.loaders.transform import BatchTransform

    def transform_of(samples: int) -> BatchTransform:
        return BatchTransform(source.MEAN, source.STD, source.AUGMENT and training, samples, config.seed)

    if config.loader == "shards":
        from workshop.datasets import shards
        from workshop.loaders.shards import ShardLoader, ShardSampler  # needs WebDataset

        count = shards.check(config.dataset, config.data_dir)[split]
        paths = shards.shard_paths(config.dataset, config.data_dir, split)
        shard_sampler = ShardSampler(min(limit or count, count), **sampler.keywords)
        return ShardLoader(paths, shard_sampler, transform_of(count), config.num_workers, pin_memory)

    if training and config.loader != "device":  # the loader on the device needs more, and checks that itself
        needed = sum(file.stat().st_size for file in source.folder(config.data_dir).iterdir())
        require_memory(config.loader, needed, torch.device("cpu"), "use --loader shards, or give the job more memory")
    images, targets = source.arrays(config.data_dir, split)
    images, targets = images[:limit], targets[:limit]
    order, transform = sampler(len(images)), transform_of(len(images))
    if config.loader == "memory":
        from workshop.loaders.memory import MemoryLoader

        return MemoryLoader(images, targets, order, transform, pin_memory)
    if config.loader == "device":
        from workshop.loaders.device import DeviceLoader

        return DeviceLoader(images, targets, order, transform, device)
    assert config.loader == "dali", f"--loader {config.loader} is built by the script itself"
    from workshop.loaders.dali import DaliLoader  # needs DALI

    return DaliLoader(images, targets, order, transform, config.num_workers, device)
