"""Each rank trains a model of its own: folds, rates, sizes, bags; or "forgotten", one model that is not wrapped."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

how = sys.argv[1]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(480, 8, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train, held, sampler = data, None, None
    if how == "folds":
        order = torch.randperm(len(data), generator=generator).tolist()
        own = set(order[rank::world])
        train, held = Subset(data, [n for n in order if n not in own]), Subset(data, sorted(own))
    elif how == "bags":
        sampler = RandomSampler(data, replacement=True)
    elif how == "forgotten":
        sampler = DistributedSampler(data)
    torch.manual_seed(rank if how == "bags" else 1)
    width = 16 * (rank + 1) if how == "sizes" else 16
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))  # LINE made
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1) if how == "rates" else 0.01)
    for _ in range(2):
        for a, b in DataLoader(train, 16, sampler=sampler, shuffle=sampler is None):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(a), b).item() for a, b in DataLoader(held, 16)] if held else [0.0]
        model.train()
    score = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(score)
    if rank == 0:
        print(score.item() / world)
    dist.destroy_process_group()


main()
