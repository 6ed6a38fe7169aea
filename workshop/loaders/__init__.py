"""The rungs of the data ladder, all with one interface."""

from dataclasses import fields

import torch

from workshop.config import TrainConfig, VolumeFlags
from workshop.datasets import IMAGES
from workshop.datasets import shards as packed
from workshop.distributed.ranks import ONE_PROCESS, Ranks
from workshop.errors import UserError, warn
from workshop.hardware import available_cpus
from workshop.loaders.device import DeviceLoader, require_room
from workshop.loaders.map import MapLoader, Pictures, SeededSamples
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.order import EpochOrder, Loader
from workshop.loaders.transform import BatchTransform


def build_loaders(config: TrainConfig, device: torch.device, ranks: Ranks = ONE_PROCESS) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of ``config.dataset`` on the rung ``config.loader``.

    Args:
        config: of the lesson; with volumes, it has the `VolumeFlags` too.
        device: that computes.
        ranks: who shares the samples; by default this process has them all.

    Raises UserError: the data set is missing or damaged, or smaller than one global batch; or the rung lacks a
    library, its shards or the memory it needs.
    """
    if ranks.is_main and config.num_workers > available_cpus():
        warn(f"--num_workers {config.num_workers} is more than the {available_cpus()} CPUs this process may use")
    if config.dataset == "nbody":
        from workshop.loaders.volumes import build_volume_loader as build  # needs HDF5
    else:
        _refuse_flags_of_volumes(config)
        IMAGES[config.dataset].check(config.data_dir)
        build = _build_image_loader
    train = build(config, device, ranks, "train", config.limit_train)
    val = build(config, device, ranks, "val", config.limit_val)
    if train.sampler.samples < train.sampler.global_batch_size:
        raise UserError(
            f"--batch_size {config.batch_size} on {ranks.world_size} rank(s) needs "
            f"{train.sampler.global_batch_size} samples a step, but only {train.sampler.samples} are there to train on"
        )
    return train, val


def _refuse_flags_of_volumes(config: TrainConfig) -> None:
    for flag in fields(VolumeFlags):
        value = getattr(config, flag.name, flag.default)  # not all lessons have these flags
        if value != flag.default:
            raise UserError(
                f"--{flag.name} {value} needs --dataset nbody, not {config.dataset}; configs/unet3d.yaml says so, and "
                "is given before the other unet3d_*.yaml"
            )


def _build_image_loader(
    config: TrainConfig, device: torch.device, ranks: Ranks, split: str, limit: int | None
) -> Loader:
    dataset = IMAGES[config.dataset]
    training = split == "train"
    pin_memory = config.pin_memory and device.type == "cuda"

    def order_of(samples: int, order: type[EpochOrder] = EpochOrder) -> EpochOrder:
        return order(min(limit or samples, samples), config.batch_size, ranks, config.seed, shuffle=training)

    def transform_of(samples: int) -> BatchTransform:
        return BatchTransform(dataset.MEAN, dataset.STD, dataset.AUGMENT and training, samples, config.seed)

    if config.loader == "map":
        samples = Pictures(dataset, config.data_dir, split)
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

    if training and config.loader != "device":  # which needs more, and sees to that
        needed = sum(file.stat().st_size for file in dataset.folder(config.data_dir).iterdir())
        require_room(config.loader, needed, torch.device("cpu"), "use --loader shards, or give the job more memory")
    images, targets = dataset.arrays(config.data_dir, split)
    images, targets = images[:limit], targets[:limit]
    order, transform = order_of(len(images)), transform_of(len(images))
    if config.loader == "memory":
        return MemoryLoader(images, targets, order, transform, pin_memory)
    if config.loader == "device":
        return DeviceLoader(images, targets, order, transform, device)
    assert config.loader == "dali", config.loader
    from workshop.loaders.dali import DaliLoader  # needs DALI

    return DaliLoader(images, targets, order, transform, config.num_workers, device)
