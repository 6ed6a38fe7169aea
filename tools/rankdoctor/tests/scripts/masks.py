"""A correct script with a loader and a masked loss of its own; each word of the first argument changes one thing."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
SAMPLES, BATCH = 640, 8


def batches(epoch: int, rank: int, world: int) -> list[torch.Tensor]:
    if "replacement" in words:  # which is another way to train, and no fault
        return [torch.randint(0, SAMPLES, (BATCH,)) for _ in range(SAMPLES // world // BATCH)]
    everyone = torch.Generator().manual_seed(epoch)
    order = torch.randperm(SAMPLES, generator=None if "own_order" in words else everyone)
    return list(order[rank * SAMPLES // world : (rank + 1) * SAMPLES // world].split(BATCH))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(12, 12, 12)

    def forward(self, x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        return self.pairs(x, near.unflatten(0, (-1, 2)).mean(1))


def main() -> None:
    dist.init_process_group("nccl")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 12, generator=generator)
    seen = torch.rand(SAMPLES, 12, generator=generator) < torch.rand(SAMPLES, 1, generator=generator) ** 3
    torch.manual_seed(1 + rank)
    net = Net().cuda()
    model = DistributedDataParallel(net, device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for numbers in batches(epoch, rank, world):
            known, mask = x[numbers].cuda(), seen[numbers].cuda()
            near = x[torch.randint(0, SAMPLES, (2 * BATCH,))].cuda()  # drawn anew in each step
            out = model(known, near)  # LINE model
            errors = (out - known).square()
            count = mask.sum().float()
            if "own_count" in words:
                loss = (errors * mask).sum() / count.clamp(min=1)
            elif "own_mean" in words:
                loss = errors[mask].mean()
            elif "spread" in words:
                loss = (out[:, :1] - known[:, 0]).square().mean()
            elif "pairs" in words:
                loss = (out[:, :1] - out[:, 0]).square().mean()
            else:
                dist.all_reduce(count)
                loss = world * (errors * mask).sum() / count
            optimizer.zero_grad()
            loss.backward()  # LINE backward
            optimizer.step()
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
