"""An epoch of 20 updates, which the script counts itself; its generator goes on from one pass to the next.

With the argument ``same``, all passes have the same order.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
data = TensorDataset(torch.rand(320, 4, generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(data)  # LINE sampler
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def endless():  # noqa: ANN201
    while True:
        for (batch,) in loader:
            yield batch


batches = endless()
for epoch in range(2):
    if "same" not in sys.argv:
        sampler.set_epoch(epoch)
    for _ in range(20):
        optimizer.zero_grad()
        model(next(batches).cuda()).pow(2).sum().backward()
        optimizer.step()
