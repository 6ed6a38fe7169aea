"""Load arrays of your own a whole batch at a time: copy `batches` into your script.

    python experiments/whole_batches.py

The demonstration augments synthetic spectra (a shift, and noise), one at a time in a `DataLoader`, then in batches.
You should see that whole batches are several times as fast.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from workshop.loaders import DistributedBatchSampler
from workshop.loaders.sampler import BatchLoader
from workshop.seeds import seed_generators


def batches(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    batch_size: int,
    epoch: int,
    augment: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of an epoch, in another order in each; of several ranks, each takes its own samples."""
    # one copy for an epoch: an index on the CPU would make a GPU wait for a copy in every batch
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch)).to(inputs.device)
    for chosen in order[rank : len(order) // world_size * world_size : world_size].split(batch_size):
        yield augment(inputs[chosen]), targets[chosen]  # a few calls for the whole batch


def shift_and_noise(spectra: torch.Tensor) -> torch.Tensor:
    """Return spectra (N, length), each shifted by up to 8 pixels, with noise."""
    shifts = torch.randint(-8, 9, (len(spectra), 1), device=spectra.device)
    pixels = (torch.arange(spectra.shape[1], device=spectra.device) + shifts) % spectra.shape[1]
    return spectra.gather(1, pixels) + 0.01 * torch.randn_like(spectra)


class WholeBatches(BatchLoader):
    """The same for a copy of lesson 01's train.py: `make_loader` returns it. Runs can be resumed, benchmarked."""

    batch_sampler: DistributedBatchSampler

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        batch_sampler: DistributedBatchSampler,
        augment: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    ) -> None:
        self.dataset, self.targets, self.batch_sampler, self.augment = inputs, targets, batch_sampler, augment

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of the epoch that the sampler is told."""
        sampler, device = self.batch_sampler, self.dataset.device
        parts = [*sampler.batches()]
        order = torch.cat(parts).to(device)  # one copy for an epoch, as above
        for step, chosen in enumerate(order.split([len(part) for part in parts]), start=sampler.start_step):
            # What `augment` draws follows from the step, so that a resumed run draws the same; the last number keeps
            # it apart from what the script draws in this step.
            seed_generators(device, sampler.seed, sampler.epoch, step, sampler.rank, 1)
            yield self.augment(self.dataset[chosen]), self.targets[chosen]


class OneByOne(Dataset):
    """The same spectra, one at a time, as a `DataLoader` asks for them."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return shift_and_noise(self.inputs[index : index + 1])[0], self.targets[index]


def samples_per_second(loader: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return how fast a loader alone is."""
    started = time.perf_counter()
    count = sum(len(targets) for _, targets in loader)
    return count / (time.perf_counter() - started)


def main() -> None:
    """Measure both on the same spectra, in turn, three times."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    inputs, targets = torch.randn(6400, 500).cumsum(1), torch.randint(10, (6400,))
    one_by_one = DataLoader(OneByOne(inputs, targets), batch_size=64, shuffle=True)
    for epoch in range(3):
        single = samples_per_second(one_by_one)
        whole = samples_per_second(batches(inputs, targets, 64, epoch, shift_and_noise))
        print(f"one by one {single:,.0f}  whole batches {whole:,.0f} spectra/s: {whole / single:.1f} times as fast")


if __name__ == "__main__":
    main()
