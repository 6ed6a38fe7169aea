"""Ways to load samples (``--loader``), all with one interface: `workshop.loaders.sampler.Loader`.

The default, ``map``, is PyTorch's own ``DataLoader`` over a map-style data set; the train scripts build it themselves.
"""

from functools import partial
from typing import Any

import torch

from workshop.config import LessonFlags
from workshop.datasets import image_dataset, nbody
from workshop.datasets import shards as shard_files
from workshop.errors import UserError
from workshop.hardware import require_memory
from workshop.loaders.device import DeviceLoader
from workshop.loaders.images import ImageDataset
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler, Loader
from workshop.loaders.shards import ShardLoader, ShardSampler
from workshop.loaders.transform import BatchTransform
from workshop.loaders.volumes import VolumeDataset, VolumeLoader
from workshop.ranks import Ranks

__all__ = ["DistributedBatchSampler", "ImageDataset", "Loader", "VolumeDataset", "build_loader", "build_volume_loader"]


def build_loader(config: LessonFlags, split: str, ranks: Ranks) -> BatchLoader:
    """Build the loader ``config.loader`` of a split of images: ``shards``, ``memory``, ``device`` or ``dali``.

    Args:
        config: names the data set, the loader and the samples per rank and step.
        split: ``"train"`` or ``"val"``.
        ranks: this process among those that share the samples.

    Raises:
        UserError: the data set or its shards are missing or damaged; a library is missing, or memory.
    """
    source = image_dataset(config.dataset)
    training = split == "train"
    limit = config.limit_train if training else config.limit_val
    device = ranks.device
    pin_memory = config.pin_memory and device.type == "cuda"
    share: dict[str, Any] = {"rank": ranks.rank, "num_replicas": ranks.world_size}
    share |= {"shuffle": training, "seed": config.seed}
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


def build_volume_loader(
    config: LessonFlags, dataset: VolumeDataset, batch_sampler: DistributedBatchSampler, device: torch.device
) -> BatchLoader:
    """Build the loader ``config.loader`` of volumes: ``memory``, ``device`` or ``dali``.

    Args:
        config: names the loader.
        dataset: says which cubes of which box.
        batch_sampler: says which of them make up each batch.
        device: that computes.

    Raises:
        UserError: there are no such shards, a library is missing, or the box does not fit into memory.
    """
    loader = config.loader
    if loader == "shards":
        raise UserError("--loader shards has no volumes; --loader map, memory, device or dali has")
    assert loader != "map", "--loader map is built by the script itself"
    box = dataset.box
    where, other = (device, "memory") if loader == "device" else (torch.device("cpu"), "map")
    cells = box.cells**3
    if loader == "dali":  # makes a copy, and continues it if it is periodic
        cells += (box.cells + (dataset.size - 1) * box.periodic) ** 3
    channels = sum(nbody.CHANNELS.values())
    if loader == "device":  # makes a copy with more channels
        channels += channels + len(nbody.CHANNELS) * len(nbody.VELOCITY)
    needed = 4 * channels * cells
    require_memory(loader, needed, where, f"use --loader {other}", f" for {box.path}")
    boxes = nbody.read(box, where)
    if loader == "dali":
        from workshop.loaders.volume_dali import VolumeDaliLoader  # here, because not every machine has DALI

        return VolumeDaliLoader(boxes, dataset, batch_sampler, config.num_workers, device)
    pin_memory = config.pin_memory and loader == "memory" and device.type == "cuda"
    return VolumeLoader(boxes, dataset, batch_sampler, pin_memory)
