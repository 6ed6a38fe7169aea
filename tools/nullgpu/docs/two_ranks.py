"""Train a layer with DDP on two ranks, of which one has twice the work: an example for the clock of nullgpu.

nullgpu --clock a100 --gpus 2 torchrun --standalone --nproc-per-node 2 docs/two_ranks.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.zeros(4096 if rank == 0 else 8192, 4096, device="cuda")

for _ in range(20):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
dist.destroy_process_group()
