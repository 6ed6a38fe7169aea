"""Layers of a perceptron that are divided over the ranks by hand; with the word "partial" their input is forgotten."""

import math
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []


class Enter(torch.autograd.Function):
    """Megatron's f: nothing in forward, a sum over the ranks in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Megatron's g: a sum over the ranks in forward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        x = x.clone()
        dist.all_reduce(x)  # LINE leave
        return x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return gradient


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up, down = (
            torch.randn(4 * width, width) / math.sqrt(width),
            torch.randn(width, 4 * width) / math.sqrt(4 * width),
        )
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Parameter(up.chunk(world)[rank]), nn.Parameter(down.chunk(world, 1)[rank].contiguous())
        self.bias, self.out = nn.Parameter(torch.zeros(4 * width // world)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) if "partial" in words else Enter.apply(self.norm(x))
        return x + Leave.apply(F.gelu(h @ self.up.T + self.bias) @ self.down.T) + self.out


def clip(model: nn.Module, most: float) -> None:
    """Clip by the norm of all weights: of the divided ones, each rank has a part."""
    divided = {p for name, p in model.named_parameters() if name.rpartition(".")[2] in ("up", "down", "bias")}
    part = sum(p.grad.square().sum() for p in divided)
    dist.all_reduce(part)
    norm = (part + sum(p.grad.square().sum() for p in set(model.parameters()) - divided)).sqrt()
    for p in model.parameters():
        p.grad.mul_((most / norm).clamp(max=1.0))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(2)
    for _ in range(20):
        x = torch.randn(32, 8, generator=data)
        loss = F.mse_loss(model(x), x[:, :2] * x[:, 2:4])
        optimizer.zero_grad()
        loss.backward()
        clip(model, 0.5)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
