"""``--loader shards``: tar files read from front to back with WebDataset, instead of single samples at random."""

import io
import random
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from workshop.datasets.shards import SHARDS, read
from workshop.errors import UserError
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.loaders.transform import BatchTransform

try:
    import webdataset as wds
    from webdataset.tariterators import group_by_keys, tar_file_expander
except ImportError:
    raise UserError("--loader shards needs WebDataset: pip install webdataset") from None

SHUFFLE_BUFFER = 2000
"""samples a worker holds back and chooses from: enough to mix what lies side by side in a shard"""


class ShardSampler(DistributedBatchSampler):
    """Which shards a rank reads in an epoch, and how many batches they give.

    The shards are shared among the ranks anew in every epoch. Where that leaves some ranks with a sample more than
    others, the steps are those of the rank with the fewest, so that in training all take as many.
    """

    def shards(self, rank: int) -> list[int]:
        """Return the numbers of the shards that ``rank`` reads, in the order it reads them."""
        order = list(range(SHARDS))
        if self.shuffle:
            random.Random((self.seed << 32) + self.epoch).shuffle(order)
        return order[rank :: self.num_replicas]

    def samples_of(self, rank: int) -> int:
        """Return how many samples are in the shards that ``rank`` reads."""
        return sum(len(range(shard, self.num_samples, SHARDS)) for shard in self.shards(rank))

    def _steps(self) -> int:
        ranks = range(self.num_replicas) if self.shuffle else [self.rank]
        return -(-min(map(self.samples_of, ranks)) // self.batch_size)

    def __len__(self) -> int:
        return self._steps() if self.max_steps is None else min(self._steps(), self.max_steps)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together get in this epoch: some ranks leave out their last ones, for equal steps."""
        if not self.shuffle:
            return self.num_samples
        at_most = self._steps() * self.batch_size
        return sum(min(self.samples_of(rank), at_most) for rank in range(self.num_replicas))

    @property
    def full_steps(self) -> int:
        """How many steps of every epoch have a full batch on every rank, whichever rank reads which shards."""
        in_every_shard, larger_shards = divmod(self.num_samples, SHARDS)  # the larger ones have one sample more
        shards_per_rank = SHARDS // self.num_replicas
        smaller_shards = SHARDS - larger_shards
        fewest = shards_per_rank * in_every_shard + max(0, shards_per_rank - smaller_shards)
        return fewest // self.batch_size


class ShardLoader(BatchLoader):
    """Batches (inputs, targets) in CPU memory, from WebDataset shards read by worker processes.

    Raises:
        UserError: the shards cannot be shared evenly by the ranks.
    """

    def __init__(
        self,
        paths: list[str],
        batch_sampler: ShardSampler,
        transform: BatchTransform,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        if SHARDS % batch_sampler.num_replicas:
            raise UserError(
                f"--loader shards has {SHARDS} shards, which {batch_sampler.num_replicas} ranks cannot share evenly"
            )
        self.paths = paths
        self.dataset = range(batch_sampler.num_samples)
        self.batch_sampler: ShardSampler = batch_sampler
        self.transform = transform
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.transform.set_epoch(self.batch_sampler.epoch)
        batch_size = self.batch_sampler.batch_size
        chunks = wds.WebLoader(
            self._pipeline(batch_size),
            batch_size=None,
            num_workers=self.num_workers,
            
            generator=torch.Generator(),  # else it draws the workers' seeds from what dropout draws from
        )
        # Shards are read from front to back: the batches of steps to leave out are read as well.
        for indices, images, targets in islice(rebatch(chunks, batch_size), self.batch_sampler.start_step, len(self)):
            batch = self.transform(images, indices), targets
            yield tuple(tensor.pin_memory() for tensor in batch) if self.pin_memory else batch

    def _pipeline(self, batch_size: int) -> wds.DataPipeline:
        sampler = self.batch_sampler
        paths = [self.paths[shard] for shard in sampler.shards(sampler.rank)]
        shuffle = [wds.shuffle(SHUFFLE_BUFFER, rng=random.Random((sampler.seed << 32) + sampler.epoch))]
        return wds.DataPipeline(
            wds.SimpleShardList(paths),
            wds.split_by_worker,
            _samples_of,
            wds.select(partial(_is_among_first, sampler.num_samples)),
            *(shuffle if sampler.shuffle else []),
            wds.map(_index_image_target),
            wds.batched(batch_size, collation_fn=default_collate),
        )


def rebatch(chunks: Iterable[list[torch.Tensor]], batch_size: int) -> Iterator[list[torch.Tensor]]:
    """Join chunks of any length, as the workers end with, into batches of ``batch_size``; the last may be smaller."""
    rest: list[torch.Tensor] | None = None
    for chunk in chunks:
        rest = chunk if rest is None else [torch.cat(pair) for pair in zip(rest, chunk, strict=True)]
        while len(rest[0]) >= batch_size:
            yield [part[:batch_size] for part in rest]
            rest = [part[batch_size:] for part in rest]
    if rest is not None and len(rest[0]):
        yield rest


# Functions with a name, not lambdas: worker processes that are not forked get them by name.
def _samples_of(shards: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the samples of sound shards, undecoded, of each its image and class alone."""
    opened = (shard | {"stream": io.BytesIO(read(Path(shard["url"])))} for shard in shards)
    return group_by_keys(tar_file_expander(opened, select_files=re.compile(r"\d+\.(npy|cls)").fullmatch))


def _is_among_first(samples: int, sample: dict[str, Any]) -> bool:
    return int(sample["__key__"]) < samples


def _index_image_target(sample: dict[str, Any]) -> tuple[int, torch.Tensor, int]:
    try:
        image = np.lib.format.read_array(io.BytesIO(sample["npy"]), allow_pickle=False)  # which could run anything
        return int(sample["__key__"]), torch.from_numpy(image), int(sample["cls"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{sample['__url__']}: sample {sample['__key__']} is no image with a class ({error})") from None
