"""``--loader shards``: tar files read from front to back, instead of single samples at random.

`torch.utils.data.DataLoader` and Python's tarfile are enough for files on a disk. The library WebDataset reads the same
files, and from a web server or an object store too.
"""

import random
import signal
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from workshop.datasets.shards import SHARDS, read
from workshop.errors import UserError
from workshop.loaders.sampler import BatchLoader, EpochSampler
from workshop.loaders.transform import BatchTransform

SHUFFLE_BUFFER = 2000
"""size of a worker's shuffle buffer in samples: enough to mix neighbors in a shard"""
SHUFFLE_START = 100
"""samples in the shuffle buffer before the first is drawn, so that the first batch does not wait for a full one"""

Sample = tuple[int, bytes]
"""index, and content as stored"""


class ShardSampler(EpochSampler):
    """Which shards a rank reads in an epoch, and how many batches they give.

    The shards are shared among the ranks anew in every epoch. Where that leaves some ranks with a sample more than
    others, every rank takes as many training steps as the rank with the fewest samples.
    """

    def shards(self, rank: int) -> list[int]:
        """Return the numbers of the shards that ``rank`` reads, in the order it reads them."""
        order = list(range(SHARDS))
        if self.shuffle:
            self.random().shuffle(order)
        return order[rank :: self.num_replicas]

    def random(self) -> random.Random:
        """Return a source of random numbers that differ for every seed and every epoch."""
        return random.Random((self.seed << 32) + self.epoch)

    def indices(self, shard: int) -> range:
        """Return the samples in a shard."""
        return range(shard, self.num_samples, SHARDS)

    def samples_of(self, rank: int) -> int:
        """Return how many samples are in the shards that ``rank`` reads."""
        return sum(len(self.indices(shard)) for shard in self.shards(rank))

    def steps(self) -> int:
        """Return the number of steps in this epoch."""
        ranks = range(self.num_replicas) if self.shuffle else [self.rank]
        return -(-min(map(self.samples_of, ranks)) // self.batch_size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together get in this epoch: some ranks leave out their last ones, for equal steps."""
        if not self.shuffle:
            return self.num_samples
        at_most = self.steps() * self.batch_size
        return sum(min(self.samples_of(rank), at_most) for rank in range(self.num_replicas))

    @property
    def full_steps(self) -> int:
        """How many steps of every epoch have a full batch on every rank, whichever rank reads which shards."""
        fewest_first = sorted(len(self.indices(shard)) for shard in range(SHARDS))
        return sum(fewest_first[: SHARDS // self.num_replicas]) // self.batch_size


class ShardReader(IterableDataset):
    """The samples of a rank's shards in one epoch, in lists of ``batch_size``; each worker reads shards of its own."""

    def __init__(self, paths: list[Path], sampler: ShardSampler) -> None:
        self.shards = [(paths[shard], sampler.indices(shard)) for shard in sampler.shards(sampler.rank)]
        self.batch_size = sampler.batch_size
        self.random = sampler.random() if sampler.shuffle else None

    def __iter__(self) -> Iterator[list[Sample]]:
        worker = get_worker_info()
        mine = self.shards[worker.id :: worker.num_workers] if worker else self.shards
        samples: Iterator[Sample] = (sample for path, indices in mine for sample in read(path, indices))
        if self.random:
            samples = shuffled(samples, self.random)
        while batch := list(islice(samples, self.batch_size)):
            yield batch


class ShardLoader(BatchLoader):
    """Batches (inputs, targets) in CPU memory, from shards read by worker processes.

    Raises:
        UserError: the shards cannot be shared evenly by the ranks, or a rank could get no sample.
    """

    less_work = "--loader memory"
    can_have_workers = True
    batch_sampler: ShardSampler

    def __init__(
        self,
        paths: list[Path],
        sample_shape: tuple[int, ...],
        batch_sampler: ShardSampler,
        transform: BatchTransform,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        if SHARDS % batch_sampler.num_replicas:
            raise UserError(
                f"--loader shards has {SHARDS} shards, which {batch_sampler.num_replicas} ranks cannot share evenly"
            )
        most_empty = SHARDS - SHARDS // batch_sampler.num_replicas
        if batch_sampler.shuffle and batch_sampler.num_samples <= most_empty:
            raise UserError(f"--loader shards needs more than {most_empty} samples to give each rank some")
        self.paths = paths
        self.sample_shape = sample_shape
        self.dataset = range(batch_sampler.num_samples)
        self.batch_sampler = batch_sampler
        self.transform = transform
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of one epoch."""
        sampler = self.batch_sampler
        self.transform.set_epoch(sampler.epoch)
        loader = DataLoader(
            ShardReader(self.paths, sampler),
            batch_size=None,  # they are batches already
            num_workers=self.num_workers,
            worker_init_fn=ignore_stop_signal,
        )
        # Shards are read from front to back: the batches of steps to leave out are read as well.
        for samples in islice(rebatched(loader, sampler.batch_size), sampler.start_step, len(self)):
            content = torch.frombuffer(bytearray().join(sample for _, sample in samples), dtype=torch.uint8)
            content = content.view(len(samples), -1)
            images, targets = content[:, :-1].reshape(-1, *self.sample_shape), content[:, -1].long()
            yield self.transform(images, torch.tensor([index for index, _ in samples])), targets


def ignore_stop_signal(worker_id: int) -> None:
    """Ignore, in a worker, the signal that Slurm sends to the whole job before the time limit: it would end it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def shuffled(samples: Iterator[Sample], random: random.Random) -> Iterator[Sample]:
    """Yield the samples in random order, from a shuffle buffer; until it is full, it reads two for each one drawn."""
    buffer: list[Sample] = []
    for sample in samples:
        buffer.append(sample)
        if len(buffer) < SHUFFLE_BUFFER:
            buffer.extend(islice(samples, 1))
        if len(buffer) >= SHUFFLE_START:
            yield _pick(buffer, random)
    while buffer:
        yield _pick(buffer, random)


def _pick(buffer: list[Sample], random: random.Random) -> Sample:
    chosen = random.randint(0, len(buffer) - 1)
    buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
    return buffer.pop()


def rebatched(parts: Iterable[list[Sample]], batch_size: int) -> Iterator[list[Sample]]:
    """Regroup lists of any length into lists of ``batch_size``; the last may be shorter."""
    rest: list[Sample] = []
    for part in parts:
        rest += part
        while len(rest) >= batch_size:
            yield rest[:batch_size]
            rest = rest[batch_size:]
    if rest:
        yield rest
