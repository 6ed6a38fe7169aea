"""The rungs of the data ladder, all with one interface."""

from collections.abc import Iterator
from typing import Protocol

import torch

from workshop import datasets
from workshop.config import TrainConfig
from workshop.distributed import Ranks, available_cpus
from workshop.errors import UserError, warn
from workshop.loaders.map import MapLoader
from workshop.loaders.order import EpochOrder


class Loader(Protocol):
    """What every rung offers: iterating gives one epoch of batches (inputs, targets), len() their number."""

    sampler: EpochOrder

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...
    def __len__(self) -> int: ...


def build_loaders(config: TrainConfig, ranks: Ranks) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of ``config.dataset`` on the rung ``config.loader``.

    Raises:
        UserError: the data set is missing or damaged, or smaller than one global batch.
    """
    dataset = datasets.DATASETS[config.dataset]
    dataset.check(config.data_dir)
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
    dataset = datasets.DATASETS[config.dataset].dataset(config.data_dir, split)
    samples = min(limit or len(dataset), len(dataset))
    sampler = EpochOrder(samples, config.batch_size, ranks, config.seed, shuffle=split == "train")
    return MapLoader(dataset, sampler, config.num_workers, pin_memory=ranks.device.type == "cuda")
