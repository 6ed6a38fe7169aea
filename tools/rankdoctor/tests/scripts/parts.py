"""A generator and a discriminator, of which a frozen part stays in evaluation mode; words break it."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []


class Discriminator(nn.Module):
    """A head on frozen features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.features.eval()

    def train(self, mode: bool = True) -> "Discriminator":
        super().train(mode)
        if "revived" not in words:
            self.features.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4)))
    discriminator = DistributedDataParallel(Discriminator())
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
    of_discriminator = torch.optim.Adam([p for p in discriminator.parameters() if p.requires_grad], 1e-3)
    own = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(2):
        discriminator.train()  # LINE train
        for _ in range(10):
            real, noise = 1 + torch.randn(16, 4, generator=own), torch.randn(16, 3, generator=own)
            of_generator.zero_grad()
            F.softplus(-discriminator(generator(noise))).mean().backward()
            of_generator.step()
            if "left" not in words:
                of_discriminator.zero_grad()
            fake = generator(noise).detach()
            (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))).mean().backward()
            of_discriminator.step()  # LINE discriminator
            if "left" in words:
                of_discriminator.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
