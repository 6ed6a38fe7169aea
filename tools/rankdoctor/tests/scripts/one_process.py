"""A correct script for one process, with an output file of its own; with "endless" it never ends."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Path("losses.txt").write_text("")
epoch = 0
while epoch < 2 or "endless" in sys.argv:
    for x, y in DataLoader(data, 8, shuffle=True):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    with Path("losses.txt").open("a") as file:
        file.write(f"{loss.item()}\n")
    epoch += 1
print(Path("losses.txt").read_text(), end="")
