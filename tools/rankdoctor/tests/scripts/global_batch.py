"""The same training on any number of ranks; words of the second argument put faults into it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

batch_size = int(sys.argv[1])
words = sys.argv[2].split(",") if len(sys.argv) > 2 else []


def main() -> None:
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    size = 45 if "unequal" in words else 48
    data = TensorDataset(
        torch.randn(size, 6), torch.randint(-1, 4, (size,)) if "ignored" in words else torch.randint(4, (size,))
    )
    sampler = DistributedSampler(data, shuffle=True, seed=os.getpid() if "unseeded" in words else 3)
    if "not_shared" in words:
        sampler = None
    loader = DataLoader(data, batch_size, sampler=sampler)
    norm = nn.BatchNorm1d(16) if "batch_norm" in words else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4)).cuda()
    model = fully_shard(model) if "fsdp" in words else DistributedDataParallel(model)
    rate = 0.01 * (world if "rate" in words else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for epoch in range(2):
        if sampler:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda(), ignore_index=-1).backward()
            if "summed" in words or ("late" in words and epoch):
                for p in model.parameters():
                    p.grad *= world
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # LINE update
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
