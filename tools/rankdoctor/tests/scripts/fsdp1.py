"""A correct script with FSDP1, which the doctor's stand-in for CUDA cannot run: null GPUs can."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.arange(128) % 3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
model = FullyShardedDataParallel(
    model, device_id=local, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), use_orig_params=True
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(local)).float(), y.to(local))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
dist.destroy_process_group()
