"""A correct contrastive training on two views of each sample; the first argument chooses how a mask leaves out the
sample itself, and "no_offset" lets the mask forget the rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

words = sys.argv[1].split(",")
SAMPLES, BATCH = 640, 8


def loss_of(z: torch.Tensor, rank: int) -> torch.Tensor:
    n = len(z)
    if "plain" in words:  # the features of other ranks are constants
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.detach())
        every = torch.cat(parts)
    else:
        every = all_gather_tensor_autograd(z, 0, dist.group.WORLD)
    scores = z @ every.T / 0.5
    rows = torch.arange(n, device=z.device)
    own = rows + (0 if "no_offset" in words else rank * n)
    pairs = (rows + n // 2) % n + rank * n
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[rows, own] = True
    if "times" in words:
        return (torch.log((scores.exp() * ~mask).sum(1)) - scores[rows, pairs]).mean()
    if "minus" in words:
        scores = scores - 1e9 * mask
    elif "left" in words:  # what is left has a column less
        pairs = pairs - (pairs > own).long()
        scores = scores[~mask].view(n, -1)
    else:
        scores = scores.masked_fill(mask, float("-inf"))
    if "sums" in words:
        return (scores.logsumexp(1) - scores[rows, pairs]).mean()
    return F.cross_entropy(scores, pairs)


def main() -> None:
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 12))
    sampler = DistributedSampler(data, seed=3)
    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(nn.Linear(12, 2 * BATCH).cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            x = x.cuda()
            views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
            loss = loss_of(F.normalize(model(views), dim=1), rank)
            optimizer.zero_grad()
            loss.backward()  # LINE backward
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "contrast.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
