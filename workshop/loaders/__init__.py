"""The rungs of the data ladder, all with one interface."""

from collections.abc import Iterator
from typing import Protocol

import torch

from workshop.config import TrainConfig
from workshop.datasets import DATASETS, IMAGES, nbody
from workshop.datasets import shards as packed
from workshop.distributed import Ranks, available_cpus
from workshop.errors import UserError, warn
from workshop.loaders.device import DeviceLoader
from workshop.loaders.map import MapLoader, SeededSamples
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.order import EpochOrder
from workshop.loaders.transform import BatchTransform
from workshop.loaders.volumes import build_volume_loader


class Loader(Protocol):
    """What every rung offers: iterating gives one epoch of batches (inputs, targets), len() their number."""

    sampler: EpochOrder

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...
    def __len__(self) -> int: ...


def build_loaders(config: TrainConfig, ranks: Ranks) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of ``config.dataset`` on the rung ``config.loader``.

    Raises:
        UserError: the data set is missing or damaged, or smaller than one global batch; or the rung lacks a library,
            its shards or the memory it needs.
    """
    DATASETS[config.dataset].check(config.data_dir)
    if ranks.is_main and config.num_workers > available_cpus():
        warn(f"--num_workers {config.num_workers} is more than the {available_cpus()} CPUs this process may use")
    train = _build_loader(config, ranks, "train", config.limit_train)
    val = _build_loader(config, ranks, "val", config.limit_val)
    if train.sampler.samples < train.sampler.global_batch_size:
        raise UserError(
            f"--batch_size {config.batch_size} on {ranks.world_size} rank(s) needs "
            f"{train.sampler.global_batch_size} samples a step, but only {train.sampler.samples} are there to train on"
        )
    return train, val


def _build_loader(config: TrainConfig, ranks: Ranks, split: str, limit: int | None) -> Loader:
    if config.dataset == nbody.NAME:
        return build_volume_loader(config, ranks, split, limit)
    dataset = IMAGES[config.dataset]
    training = split == "train"
    pin_memory = config.pin_memory and ranks.device.type == "cuda"

    def order_of(samples: int, order: type[EpochOrder] = EpochOrder) -> EpochOrder:
        return order(min(limit or samples, samples), config.batch_size, ranks, config.seed, shuffle=training)

    def transform_of(samples: int) -> BatchTransform:
        return BatchTransform(dataset.MEAN, dataset.STD, dataset.AUGMENT and training, samples, config.seed)

    if config.loader == "map":
        samples = dataset.dataset(config.data_dir, split)
        return MapLoader(
            SeededSamples(samples, config.seed),
            order_of(len(samples)),
            config.num_workers,
            pin_memory,
            config.persistent_workers,
            config.prefetch_factor,
        )
    if config.loader == "shards":
        from workshop.loaders.shards import ShardLoader, ShardOrder  # needs WebDataset

        count = packed.check(config.dataset, config.data_dir)[split]
        paths = packed.shard_paths(config.dataset, config.data_dir, split)
        return ShardLoader(paths, order_of(count, ShardOrder), transform_of(count), config.num_workers, pin_memory)

    images, targets = dataset.arrays(config.data_dir, split)
    images, targets = images[:limit], targets[:limit]
    order, transform = order_of(len(images)), transform_of(len(images))
    if config.loader == "memory":
        return MemoryLoader(images, targets, order, transform, pin_memory)
    if config.loader == "device":
        return DeviceLoader(images, targets, order, transform, ranks.device)
    assert config.loader == "dali", config.loader
    from workshop.loaders.dali import DaliLoader  # needs DALI

    return DaliLoader(images, targets, order, transform, config.num_workers, ranks.device)
