"""A loop that leaves out batches; the first argument says how: alone, agreed, function, by_step, join, local, hand."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

how = sys.argv[1] if len(sys.argv) > 1 else "alone"


def any_rank(flag: bool) -> bool:
    on_all = torch.tensor(float(flag), device="cuda")
    dist.all_reduce(on_all, op=dist.ReduceOp.MAX)
    return bool(on_all)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    if x.abs().max() > 50:  # LINE function
        print("a damaged batch")
        return
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    if how == "hand":
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
    optimizer.step()


def main() -> None:
    dist.init_process_group("nccl")
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 6, generator=numbers), torch.arange(128) % 3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
    if how not in ("local", "hand"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]) if how == "join" else contextlib.nullcontext():
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for step, (x, y) in enumerate(loader):
                damaged = bool(x.abs().max() > 50)
                if how == "agreed":
                    stop = any_rank(damaged)
                    if stop:
                        print("all leave this one out")
                        continue
                if how == "by_step":  # noqa: SIM102  # one condition would be reached in all ways
                    if step < 0:
                        print("done before")
                        continue
                if how in ("alone", "join", "local"):  # noqa: SIM102
                    if damaged:  # LINE alone
                        print("a damaged batch")
                        continue
                if how in ("function", "hand"):
                    train_step(model, optimizer, x, y)
                    continue
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
