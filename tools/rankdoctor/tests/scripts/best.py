"""A correct script that keeps its best weights; each word of the first argument changes something, or makes a fault."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []


class Spectra(Dataset):
    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.noise = torch.randn(195, 8, generator=generator), noise
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + self.noise * torch.randn(8), self.y[i]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def pretrain(model: nn.Module) -> None:
    """Train on all ranks alike: it takes a second, so each repeats it."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        x = torch.rand(32, 8)
        loss = F.cross_entropy(model(x), (x.sum(1) > 4).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if "members" in words else 0)
    model = net()
    if "repeated" in words:
        pretrain(model)
    ddp = model if "members" in words else DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    noisy = Spectra(0.1)
    held_out = noisy if "augmented" in words else Spectra(0.0)
    train = Subset(noisy, range(128))
    # rank 0 has 33 of the 65 samples, and so a batch of one sample more than rank 1
    val = Subset(held_out, range(128, 193))
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 8, sampler=list(range(rank, len(val), world)))  # LINE held_out
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    best, kept = -1.0, model.state_dict()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if "members" not in words:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for x, y in val_loader:
                right += (model(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        if epoch == 1 or right.item() / len(val) > best + 1:  # not in the last epoch
            best = right.item() / len(val)
            kept = model.state_dict() if "live" in words else copy.deepcopy(model.state_dict())  # LINE kept
    model.load_state_dict(kept)
    if "members" in words:
        torch.save(model.state_dict(), f"member{rank}.pt")
    elif rank == 0:
        torch.save(kept, "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
