"""A model whose forward sends messages: each rank has a part of each field, and needs a column of its neighbor's.

With the word "lost" the gradient of this column is not sent back.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn


class Halo(torch.autograd.Function):
    """Add the neighbor's first column on the right, of a periodic field on two ranks."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return torch.cat([x, exchanged(x[..., :1])], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        own = gradient[..., :-1].clone()
        if "lost" not in sys.argv:
            own[..., :1] += exchanged(gradient[..., -1:])
        return own


def exchanged(column: torch.Tensor) -> torch.Tensor:
    """Send a column to the neighbor, and return the neighbor's."""
    got = torch.empty_like(column.contiguous())
    sending = dist.isend(column.contiguous(), 1 - dist.get_rank())  # LINE sent
    dist.recv(got, 1 - dist.get_rank())
    sending.wait()
    return got


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 4, 2), nn.Conv1d(4, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(Halo.apply(torch.tanh(self.one(Halo.apply(x)))))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fields = torch.randn(32, 1, 16)
    for step in range(8):
        x = fields[4 * (step % 8) : 4 * (step % 8) + 4].chunk(2, -1)[dist.get_rank()]
        loss = (model(x) - x.roll(1, -1)).square().sum() / (4 * 16)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()


main()
