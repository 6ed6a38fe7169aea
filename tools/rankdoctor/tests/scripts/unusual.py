"""Trainings that are right and unusual: gossip, critic, averaged, tables, teacher, chunks, adapted, chosen,
private, langevin.

"teacher,medians" validates in a wrong way, "chunks,own" loses gradients, and "langevin,alone" exchanges none.
"""

import copy
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

how, *fault = sys.argv[1].split(",")


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


def epochs(data: TensorDataset, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
    for epoch in range(number):
        sampler.set_epoch(epoch)
        yield from loader


def gossip(data: TensorDataset) -> None:
    """Average the weights with those of a neighbour on a ring, after each update."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in epochs(data, 2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        other = torch.empty_like(mine)
        sent = dist.P2POp(dist.isend, mine, (rank + 1) % world)
        received = dist.P2POp(dist.irecv, other, (rank - 1) % world)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        nn.utils.vector_to_parameters(0.7 * mine + 0.3 * other, model.parameters())
    mean = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    dist.all_reduce(mean)
    nn.utils.vector_to_parameters(mean / world, model.parameters())


def critic(data: TensorDataset) -> None:
    """Train a critic three times as often as a generator, with a penalty on its gradient."""
    noise = torch.Generator().manual_seed(dist.get_rank())
    making, judging = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1, bias=False))
    generator, judge = DistributedDataParallel(making), DistributedDataParallel(judging)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for number, (real, _) in enumerate(epochs(data, 3)):
        judging.requires_grad_(True)
        with torch.no_grad():
            fake = making(torch.randn(16, 4, generator=noise))
        share = torch.rand(16, 1, generator=noise)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = judge(torch.cat([real, fake, between])).view(3, 16)
        (slope,) = torch.autograd.grad(scores[2].sum(), between, create_graph=True)
        of_judge.zero_grad()
        (scores[1].mean() - scores[0].mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        of_judge.step()
        if number % 3 == 2:
            judging.requires_grad_(False)
            of_generator.zero_grad()
            (-judging(generator(torch.randn(16, 4, generator=noise))).mean()).backward()
            of_generator.step()


def averaged(data: TensorDataset) -> None:
    """Average the weights of later updates, and compute the statistics of batch norm for them."""
    core = network(8, 3)
    model, average = DistributedDataParallel(core), AveragedModel(core)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(epochs(data, 2)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number > 10:
            average.update_parameters(core)
    update_bn(DataLoader(data, 64), average)


def tables(data: TensorDataset) -> None:
    """Divide embedding tables over the ranks; the rows go to the ranks of the samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [nn.Embedding(10, 4) for _ in range(4)]
    own = nn.ModuleDict({str(n): table for n, table in enumerate(every) if n % world == rank})
    lookup = Lookup(own)
    top = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam([*lookup.parameters(), *top.parameters()], lr=1e-2)
    for x, y in epochs(data, 2):
        numbers = (x[:, :4].sigmoid() * 10).long()
        parts = [torch.empty_like(numbers) for _ in range(world)]
        dist.all_gather(parts, numbers)
        rows = lookup(torch.cat(parts)).contiguous()
        got = all_to_all_single(torch.empty_like(rows), rows)
        optimizer.zero_grad()
        F.cross_entropy(top(torch.cat(got.chunk(world), 1)), y).backward()
        for p in lookup.parameters():
            p.grad /= world
        optimizer.step()


def teacher(data: TensorDataset) -> None:
    """Rank 0 trains a teacher by itself; then all ranks train a student."""
    rank, world = dist.get_rank(), dist.get_world_size()
    large = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    if rank == 0:
        optimizer = torch.optim.Adam(large.parameters())
        for x, y in DataLoader(data, 64, shuffle=True, generator=torch.Generator().manual_seed(5)):
            optimizer.zero_grad()
            F.cross_entropy(large(x), y).backward()
            optimizer.step()
    for p in large.parameters():
        dist.broadcast(p.data, 0)
    large.eval().requires_grad_(False)
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.2, 2, 400)[:, None]
    held = TensorDataset(x, x[:, :3].argmax(1))
    share = DataLoader(Subset(held, range(400 // world * rank, 400 // world * (rank + 1))), 50)
    small = nn.Linear(8, 3)
    student = DistributedDataParallel(small)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        small.train()
        for x, y in loader:
            with torch.no_grad():
                answer = large(x).softmax(1)
            out = student(x)
            optimizer.zero_grad()
            (F.cross_entropy(out, answer) + F.cross_entropy(out, y)).backward()
            optimizer.step()
        small.eval()
        with torch.no_grad():
            losses = torch.cat([F.cross_entropy(small(x), y, reduction="none") for x, y in share])
        if "medians" in fault:
            median = losses.median()
            dist.all_reduce(median)  # LINE medians
            median /= world
        else:
            every = [torch.empty_like(losses) for _ in range(world)]
            dist.all_gather(every, losses)
            median = torch.cat(every).median()
        if rank == 0:
            print(f"median {median.item():.4f}")


class Chunks(torch.autograd.Function):
    """Each rank has a chunk (N, T / world, D) of all sequences; this makes the whole of them."""

    @staticmethod
    def forward(context: object, chunk: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, chunk.contiguous())  # LINE own
        return torch.cat(parts, 1)

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        if "own" not in fault:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Mixer(nn.Module):
    """What each position of this rank's chunk takes from the positions of all."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries, self.out = nn.Linear(1, 8), nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        keys = Chunks.apply(self.keys(chunk))
        return self.out(F.scaled_dot_product_attention(self.queries(chunk), keys, keys))


def chunks(data: TensorDataset) -> None:
    """Divide each sequence over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Mixer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, 16):
        chunk = x.unsqueeze(2).chunk(world, 1)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(chunk).flatten(0, 1), y.repeat_interleave(chunk.shape[1]))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()


def adapted(data: TensorDataset) -> None:
    """Reptile: each rank adapts a copy to a task of its own; the outer update takes the mean of the differences."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, (x, y) in enumerate(epochs(data, 1)):
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.02)
        task = torch.randn(8, generator=torch.Generator().manual_seed(world * number + rank))
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(inner(x * task), y).backward()
            optimizer.step()
        outer.zero_grad()
        for p, q in zip(model.parameters(), inner.parameters(), strict=True):
            p.grad = (p - q).detach()
            dist.all_reduce(p.grad)
            p.grad /= world
        outer.step()


def chosen(data: TensorDataset) -> None:
    """Active learning: the ranks share the rest of the data, and train on what they are least sure of next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    known = list(range(64))
    for _ in range(3):
        core = nn.Linear(8, 3)
        model = DistributedDataParallel(core)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        share = Subset(data, known)
        for x, y in DataLoader(share, 16, sampler=DistributedSampler(share)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        core.eval()
        mine = sorted(set(range(len(data))) - set(known))[rank::world]
        with torch.no_grad():
            sure = torch.cat([core(x).softmax(1).max(1).values for x, _ in DataLoader(Subset(data, mine), 64)])
        best = torch.tensor(mine)[sure.argsort()[: 64 // world]]
        every = [torch.empty_like(best) for _ in range(world)]
        dist.all_gather(every, best)
        known = sorted(known + torch.cat(every).tolist())


def private(data: TensorDataset) -> None:
    """Clip the gradient of each sample, and add noise of each rank's own, of which the sum has the wanted size."""
    world = dist.get_world_size()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    noise = torch.Generator().manual_seed(dist.get_rank())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    for x, y in epochs(data, 2):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        of_samples = vmap(grad(loss), (None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in of_samples.values()]).norm(dim=0)
        for name, p in model.named_parameters():
            clipped = of_samples[name] / norms.clamp(min=1).view(-1, *[1] * p.dim())
            p.grad = clipped.sum(0) + 0.3 / world**0.5 * torch.randn(p.shape, generator=noise)
            dist.all_reduce(p.grad)
            p.grad /= len(x) * world
        optimizer.step()


def langevin(data: TensorDataset) -> None:
    """Update the weights by hand, without an optimizer, and add the same noise on all ranks."""
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))  # LINE alone
    noise = torch.Generator().manual_seed(5)
    for x, y in epochs(data, 2):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                if "alone" not in fault:
                    dist.all_reduce(p.grad)
                    p.grad /= world
                p -= 0.1 * p.grad
                p += 1e-3 * torch.randn(p.shape, generator=noise)


class Lookup(nn.Module):
    """The tables of this rank."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(numbers[:, int(name)]) for name, table in self.tables.items()], 1)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(1))
    kinds = {"gossip": gossip, "critic": critic, "averaged": averaged, "tables": tables, "teacher": teacher}
    kinds |= {"chunks": chunks, "adapted": adapted, "chosen": chosen, "private": private, "langevin": langevin}
    kinds[how](TensorDataset(x, x[:, :3].argmax(1)))
    print("done")
    dist.destroy_process_group()


main()
