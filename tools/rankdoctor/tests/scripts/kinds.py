"""A correct script with much that looks like a fault; each word of the first argument makes one of it a real one."""

import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
NAMES = ["heron", "otter", "marten", "lynx", "vole", "stoat", "crane", "bison"]
PARTS = 1 if "reentrant" in words else 2


class Animals(Dataset):
    def __init__(self, path: str) -> None:
        self.path, self.labels = path, [NAMES[i % 8] for i in range(256)]
        self.table = np.memmap(path, dtype=np.float32, mode="r", shape=(256, 8))
        names = set(NAMES) if "set" in words else sorted(set(NAMES))
        self.index = {name: number for number, name in enumerate(names)}  # LINE index
        self.file = None
        if "handle" in words:
            self.file = open(path, "rb")  # noqa: SIM115  # LINE open

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.file is None:  # once in each worker
            self.file = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(32 * i)
        row = np.frombuffer(self.file.read(32), dtype=np.float32) + 0 * self.table[i]
        return torch.tensor(row), self.index[self.labels[i]]


class Stream(IterableDataset):
    def __init__(self, data: Dataset, numbers: range) -> None:
        self.data, self.numbers = data, numbers

    def __iter__(self):  # noqa: ANN204
        yield from (self.data[n] for n in self.numbers)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.SyncBatchNorm(16), nn.ReLU())
        self.mean, self.scale, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        if "reentrant" in words:
            self.body.requires_grad_(False)
        self.extra = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.body(x)
        if "reentrant" in words:
            h = checkpoint(self.middle, h, use_reentrant=True)  # LINE reentrant
        elif "recomputed" in words and self.training:
            h = checkpoint(self.middle, h, use_reentrant=False)  # LINE recomputed
        else:
            h = self.middle[1:](checkpoint(self.middle[0], h, use_reentrant=False))
        rate = 0.2 if self.training or "sdpa" in words else 0.0
        q = h.view(-1, 4, 4)
        h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=rate).flatten(1)  # LINE attention
        noise = torch.randn_like(h)  # as a variational autoencoder does, also in validation
        h = self.mean(h) + F.softplus(self.scale(h)) * noise
        if "noise" in words:
            h = h + 0.1 * torch.randn_like(h)  # LINE added
        out = self.head(h)
        if "branch" not in words or y is None or (y > 6).any():
            out = out + self.extra(h)
        return out


def attack(model: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    return (x + 0.01 * x.grad.sign()).detach()


def sharpness(model: nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    loss.backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    optimizer.zero_grad()
    return moves


def surgery(model: nn.Module, losses: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    kept = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, one, other in zip(model.parameters(), *kept, strict=True):
        p.grad = one + other - 0.1 * one * other.abs()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("nccl")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    path = os.path.join(tempfile.gettempdir(), f"table{rank}.bin")
    numbers = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)).numpy()
    numbers.tofile(path)
    torch.manual_seed(0)
    net = Net().cuda()
    static = "reentrant" in words  # hides the error of DDP
    model = DistributedDataParallel(net, device_ids=[local], static_graph=static)
    torch.manual_seed(100 + rank)
    data = Animals(path)
    sampler = DistributedSampler(data, seed=3)
    stream = Stream(data, range(128 * rank, 128 * rank + 40 + 16 * rank))
    loader = DataLoader(data, 16, sampler=sampler, num_workers=2, persistent_workers=True)
    if "stream" in words:
        loader = DataLoader(stream, 4)  # LINE stream
    held_out = DataLoader(Animals(path), 8, sampler=list(range(rank, 256, world)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(), y.cuda()
            if "zeroed" in words:
                optimizer.zero_grad()  # LINE zeroed
            if "attack" in words:
                x = attack(net, x, y, optimizer)
            if "sharpness" in words:
                moves = sharpness(net, F.cross_entropy(net(x), y), optimizer)
            if "surgery" in words:
                out = net(x)
                surgery(net, [F.cross_entropy(out, y), out.pow(2).mean()], optimizer)
            else:
                last = i % PARTS == PARTS - 1 or bool({"attack", "sharpness"} & set(words))
                model.require_backward_grad_sync = last
                if "clip_early" in words:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # LINE clip
                (F.cross_entropy(model(x, y), y) / PARTS).backward()  # LINE backward
                if not last:
                    continue
                if "clip_early" not in words:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if "sharpness" in words:
                with torch.no_grad():
                    for p, move in zip(net.parameters(), moves, strict=True):
                        p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = torch.zeros((), device="cuda")
        with torch.no_grad():
            for x, y in held_out:
                right += (net(x.cuda()).argmax(1) == y.cuda()).sum()
            for _ in range(4):  # Monte Carlo dropout
                F.dropout(net.mean(torch.ones(3, 16)), 0.2)
        dist.all_reduce(right)
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
