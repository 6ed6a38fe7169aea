"""Updates that the script makes itself: an evolution strategy, a sharded optimizer, gradients of two tasks, and others.

"evolve": the ranks try different weights, and compute the same update. "divide": each rank updates a part of the
weights; with "local" it clips by the norm of its part. "tasks": the gradients of two tasks are put together under
DistributedDataParallel; with "alone" nobody averages them. "sparse": an embedding has sparse gradients. "shard": two
optimizers have the weights of a sharded model; with "blocks" its root is not sharded.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

words = sys.argv[1].split(",")
STEPS, PAIRS = 24, 8


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that each rank generates for itself."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 6, generator=generator)
    return x, torch.stack([x.sum(1), x.square().sum(1)], 1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))


def evolve(rank: int, world: int) -> None:
    """All ranks have the same inputs and the same noise; each tries its own members of the population."""
    model = network()
    center = nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
    optimizer = torch.optim.Adam([center], 0.02)
    for step in range(STEPS):
        x, y = batch(step, 0)
        noise = torch.randn(PAIRS, len(center), generator=torch.Generator().manual_seed(step))
        losses = torch.zeros(PAIRS, 2)
        with torch.no_grad():
            for member in range(rank, PAIRS, world):
                for way, sign in enumerate((1, -1)):
                    vector_to_parameters(center + 0.1 * sign * noise[member], model.parameters())
                    losses[member, way] = F.mse_loss(model(x), y)
        dist.all_reduce(losses)
        center.grad = (losses[:, 0] - losses[:, 1]) @ noise / (0.2 * PAIRS)
        optimizer.step()


class Divided:
    """Adam of this rank's part of the weights; after an update the parts are gathered."""

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.weights, self.world = list(model.parameters()), world
        flat = parameters_to_vector(self.weights).detach()
        self.length = -(-len(flat) // world)
        self.flat = F.pad(flat, (0, self.length * world - len(flat)))
        self.part = nn.Parameter(self.flat[rank * self.length :][: self.length].clone())
        self.adam = torch.optim.Adam([self.part], 0.01)

    def step(self) -> None:
        gradient = torch.cat([p.grad.flatten() for p in self.weights])
        gradient = F.pad(gradient, (0, len(self.flat) - len(gradient)))
        self.part.grad = torch.zeros_like(self.part)
        dist.reduce_scatter_tensor(self.part.grad, gradient)
        self.part.grad /= self.world
        if "local" in words:
            nn.utils.clip_grad_norm_([self.part], 0.5)  # LINE clip
        else:
            square = self.part.grad.square().sum()
            dist.all_reduce(square)
            self.part.grad *= torch.clamp(0.5 / square.sqrt(), max=1)
        self.adam.step()
        dist.all_gather_into_tensor(self.flat, self.part.detach())
        vector_to_parameters(self.flat[: sum(p.numel() for p in self.weights)], self.weights)


def divide(rank: int, world: int) -> None:
    model = network()
    optimizer = Divided(model, rank, world)
    for step in range(STEPS):
        x, y = batch(step, rank)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def tasks(rank: int, world: int) -> None:
    """The gradients of two tasks are computed apart, and that of the second may not point against the first one's."""
    model = DistributedDataParallel(network())
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, 0.01)
    for step in range(STEPS):
        x, y = batch(step, rank)
        losses = F.mse_loss(model(x), y, reduction="none").mean(0)
        first, second = (
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)]) for loss in losses
        )
        if "alone" not in words:
            for gradient in (first, second):
                dist.all_reduce(gradient)
                gradient /= world
        second = second - torch.clamp(first @ second / first.square().sum(), max=0) * first
        parts = (first + second).split([p.numel() for p in weights])
        for p, part in zip(weights, parts, strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()  # LINE update


def sparse(rank: int, world: int) -> None:
    """The table is on every rank, and the script adds up its gradients."""
    table, tower = nn.Embedding(100, 4, sparse=True), DistributedDataParallel(nn.Linear(4, 2))
    optimizers = torch.optim.SparseAdam(table.parameters(), 0.01), torch.optim.Adam(tower.parameters(), 0.01)
    total = torch.zeros(())
    for step in range(STEPS):
        rows = torch.randint(0, 100, (32,), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = F.cross_entropy(tower(table(rows)), rows % 2)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        gradient = table.weight.grad.to_dense()
        dist.all_reduce(gradient)
        table.weight.grad = (gradient / world).to_sparse(1)
        for one in optimizers:
            one.step()
        total += loss.detach()
    dist.all_reduce(total)
    print(f"mean loss {total / world / STEPS:.4f}", flush=True)


def shard(rank: int, world: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential(nn.Linear(6, 16), block, nn.Linear(16, 2)).to(device)  # LINE made
    fully_shard(block)
    if "blocks" not in words:
        fully_shard(model)
    optimizers = (
        torch.optim.Adam(block.parameters()),
        torch.optim.Adam([*model[0].parameters(), *model[2].parameters()]),
    )
    for step in range(STEPS):
        x, y = (tensor.to(device) for tensor in batch(step, rank))
        F.mse_loss(model(x), y).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    {"evolve": evolve, "divide": divide, "tasks": tasks, "sparse": sparse, "shard": shard}[words[0]](
        dist.get_rank(), dist.get_world_size()
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
