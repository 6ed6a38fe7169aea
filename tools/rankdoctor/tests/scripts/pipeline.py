"""Two stages of a pipeline by hand, with four parts of each batch; with the word "one", they share a tensor."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
PARTS, SIZE, WIDTH = 4, 8, 16


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh()) if rank == 0 else nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    inputs = [torch.empty(SIZE, WIDTH)] * PARTS if "one" in words else [torch.empty(SIZE, WIDTH) for _ in range(PARTS)]
    data = torch.Generator().manual_seed(5)
    for _ in range(20):
        parts = [torch.randn(SIZE, 4, generator=data) for _ in range(PARTS)]
        sent = []
        for number, x in enumerate(parts):
            if rank == 0:
                out = stage(x)
                dist.send(out.detach(), 1)
                sent.append(out)
            else:
                dist.recv(inputs[number], 0)  # LINE receive
                h = inputs[number].detach().requires_grad_()
                sent.append((h, F.mse_loss(stage(h), x[:, :2]) / PARTS))
        for one in sent:
            if rank == 0:
                gradient = torch.empty(SIZE, WIDTH)
                dist.recv(gradient, 1)
                one.backward(gradient)
            else:
                one[1].backward()
                dist.send(one[0].grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
