"""A correct script with workers that stay, an average of the weights, and data that are scaled; words break it."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
SAMPLES = 256


class Scaling:
    """Mean and std of each column."""

    def __init__(self, x: torch.Tensor) -> None:
        sums = torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])
        if "own_scaling" not in words:
            dist.all_reduce(sums)
        self.mean = sums[1] / sums[0]  # LINE scaling
        self.std = (sums[2] / sums[0] - self.mean**2).sqrt()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


class Rows(Dataset):
    """Rows that are shifted by noise of the epoch."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.epoch, self.passes = x, 0, 0
        self.shared = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.passes += 1  # which changes no sample
        self.shared.fill_(epoch)
        if "stale" in words:
            self.epoch = epoch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch = self.epoch if "stale" in words else int(self.shared)
        generator = torch.Generator().manual_seed(SAMPLES * epoch + number)
        row = self.x[number]
        return row + 0.1 * torch.randn(row.shape, generator=generator), row[:2].sign()


class Drawn(Sampler):
    """Draws samples of this rank's part, some of them often."""

    def __init__(self, size: int) -> None:
        self.part = torch.arange(size)[dist.get_rank() :: dist.get_world_size()]
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __len__(self) -> int:
        return len(self.part)

    def __iter__(self):  # noqa: ANN204
        positions = torch.randint(len(self.part), (len(self.part),), generator=self.generator)
        yield from (positions if "positions" in words else self.part[positions]).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Draw on."""


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)) + torch.linspace(-3, 3, SAMPLES)[:, None]
    scaling = Scaling(x.chunk(world)[rank])
    rows = Rows(scaling(x))
    sampler = Drawn(SAMPLES) if {"drawn", "positions"} & {*words} else DistributedSampler(rows, shuffle=True)
    loader = DataLoader(rows, 8, sampler=sampler, num_workers=1, persistent_workers=True)  # LINE loader
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    low = "low" in words or "multiplied" in words
    average = [p.detach().to(torch.bfloat16 if low else torch.float32, copy=True) for p in net.parameters()]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rows.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mean, p in zip(average, net.parameters(), strict=True):
                value = p.detach().to(mean.dtype)
                if "multiplied" in words:
                    mean.mul_(0.999).add_(value, alpha=0.001)  # LINE average
                else:
                    mean.lerp_(value, 0.001)  # LINE average
    if rank == 0:
        averaged = copy.deepcopy(net)
        averaged.load_state_dict(dict(zip(net.state_dict(), average, strict=True)))
        torch.save(averaged.state_dict(), "averaged.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
