"""A regression whose validation two ranks share, with results that they put together in ways right and wrong."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gathered(part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)  # LINE gathered
    return torch.stack(parts, 1).flatten() if HOW == "interleaved" else torch.cat(parts)


def mean(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)  # LINE mean
    return total.item() / dist.get_world_size()


def r2(predicted: torch.Tensor, y: torch.Tensor) -> float:
    return 1 - ((y - predicted).square().sum() / (y - y.mean()).square().sum()).item()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    pairs = [(model(x)[:, 0], y) for x, y in loader]
    losses = [F.mse_loss(predicted, y).item() for predicted, y in pairs]
    predicted, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    model.train()
    if HOW == "mean of R2":
        return mean(r2(predicted, y))
    if HOW == "mean of roots":
        return mean(math.sqrt(sum(losses) / len(losses)))
    if HOW == "mean of losses":
        return mean(sum(losses) / len(losses))
    if HOW == "contrast":  # each sample among those of its batch, so it depends on which are together
        hits = [(predicted[:, None] - y).abs().argmin(1) == torch.arange(len(y)) for predicted, y in pairs]
        return mean(torch.cat(hits).double().mean().item() + 0.01)
    if HOW in ("order of the data", "interleaved"):
        return r2(gathered(predicted), loader.dataset.tensors[1])
    return r2(gathered(predicted), gathered(y))


parser = argparse.ArgumentParser()
parser.add_argument("--how", default="gathered")
parser.add_argument("--val", type=int, default=96)
arguments = parser.parse_args()
HOW = arguments.how

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256 + arguments.val, 8)
y = x.square().sum(1) * torch.linspace(0.1, 2, len(x))
train, val = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:], y[256:])
sampler = DistributedSampler(train)
loader = DataLoader(train, 16, sampler=sampler)
val_loader = DataLoader(val, 16, sampler=DistributedSampler(val, shuffle=False))
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs)[:, 0], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = evaluate(model, val_loader)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}, result {result:.4f}")
dist.destroy_process_group()
