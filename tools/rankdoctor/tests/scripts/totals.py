"""A correct script with sums, averages, streams and a vocabulary; each word of the first argument breaks one."""

import copy
import os
import random
import sys
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
FILES = 16
WORDS = [f"word{n}" for n in range(40)]


class Images(IterableDataset):
    """Images in files, which are flipped; each reader takes every k-th file."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self):  # noqa: ANN204
        info = get_worker_info()
        reader, readers = self.rank * info.num_workers + info.id, self.world * info.num_workers
        files = list(range(FILES))
        random.Random(reader if "shuffled" in words else 7).shuffle(files)
        if "worker" in words:  # the share of the rank is forgotten
            reader, readers = info.id, info.num_workers
        own = torch.Generator().manual_seed(reader)
        for file in files[reader::readers]:
            generator = torch.Generator().manual_seed(file)
            for _ in range(10):
                image = torch.randn(1, 6, 6, generator=generator)
                label = torch.randint(0, 4, (), generator=generator)
                yield (image.flip(-1) if torch.rand((), generator=own) < 0.5 else image), label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32))
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 4)

    def forward(self, image: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(image) + self.words(word)))


class TrustRatio(torch.optim.Optimizer):
    """SGD whose rate is that of LARS: the norm of a weight over that of its gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            weight, gradient = p.to_local(), p.grad.to_local()
            if "norms" in words:
                ratio = weight.norm() / (gradient.norm() + 1e-6)  # LINE norms
            else:
                ratio = p.norm().full_tensor() / (p.grad.norm().full_tensor() + 1e-6)
            rows = gradient.norm(dim=-1).numel() if p.ndim > 1 else 0  # of whole rows, each of which one rank has
            weight.sub_(gradient * ratio, alpha=1e-3 / (1 + rows))


def vocabulary(rank: int) -> dict[str, int]:
    mine = WORDS[20 * rank : 20 * rank + 25] if "vocabulary" in words else WORDS
    return {word: number for number, word in enumerate(sorted(mine, key=lambda word: zlib.crc32(word.encode())))}


def train_sharded(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    fully_shard(model)
    optimizer = TrustRatio(model.parameters(), {"lr": 0.1})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        x = torch.randn(8, 8, generator=generator).cuda()
        F.cross_entropy(model(x), torch.randint(0, 4, (8,), generator=generator).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module, rank: int) -> float:
    model.eval()
    tally, so_far = torch.zeros(2).cuda(), torch.zeros(2).cuda()
    generator = torch.Generator().manual_seed(100 + rank)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(10, 1, 6, 6, generator=generator).cuda()
            y = torch.randint(0, 4, (10,), generator=generator).cuda()
            right = (model(x, y).argmax(1) == y).sum()  # LINE average
            tally += torch.stack([right, torch.tensor(len(y)).cuda()])
            if "tally" in words:
                dist.all_reduce(tally)  # LINE tally
            else:
                so_far.copy_(tally)  # to print how far it is
                dist.all_reduce(so_far)
    if "tally" not in words:
        dist.all_reduce(tally)
    model.train()
    return float(tally[0] / tally[1])


def main() -> None:
    dist.init_process_group("nccl")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    if "sharded" in words:
        train_sharded(rank)
        return
    index = vocabulary(rank)  # LINE vocabulary
    sizes = {"rank": rank, "local": 2 + rank, "seed": 4 - rank, "a": 8, "b": 9, "c": 10, "d": 11, "e": 12}
    torch.manual_seed(0)
    net = Net().cuda()
    average = copy.deepcopy(net).requires_grad_(False)
    model = DistributedDataParallel(net, device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Images(rank, world), 8, num_workers=2, persistent_workers=True)  # LINE loader
    for _ in range(2):
        for image, label in loader:
            spoken = torch.tensor([index[w] for w in WORDS if w in index][: len(label)]).cuda()
            losses = F.cross_entropy(model(image.cuda(), spoken), label.cuda(), reduction="none")
            count = torch.tensor(float(len(label) + sizes["rank"])).cuda()
            dist.all_reduce(count)
            factor = 1 if "divided" in words else world
            (losses.sum() * factor / count).backward()  # LINE divided
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
                if "average" not in words:
                    for mean, value in zip(average.buffers(), net.buffers(), strict=True):
                        mean.copy_(value)
        for buffer in average.buffers():
            dist.broadcast(buffer, 0)
        evaluate(average, rank)
    dist.destroy_process_group()


main()
