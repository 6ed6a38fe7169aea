"""A script for CPUs that writes the losses of its epochs to a file: they are the same in each run."""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(400, 8)
data = TensorDataset(x, x[:, :3].sum(dim=1, keepdim=True))
train, val = torch.utils.data.random_split(data, [320, 80], generator=torch.Generator().manual_seed(2))
sampler = DistributedSampler(train)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    sums = torch.zeros(2)
    model.train()
    for inputs, targets in DataLoader(train, 8, sampler=sampler):
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach()
    model.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader(val, 8, sampler=range(dist.get_rank(), len(val), dist.get_world_size())):
            sums[1] += F.mse_loss(model(inputs), targets, reduction="sum")
    dist.all_reduce(sums)
    losses.append(sums.tolist())
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(losses, file)
dist.destroy_process_group()
