"""A transformer, wrapped in the way that the first argument names; further words put faults into it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

how, *words = sys.argv[1].split(",")
WIDTH = 16


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = F.gelu(self.up(self.norm(x)))
        return x + self.down(self.last)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, WIDTH), nn.Dropout(0.0 if how in ("tp", "sp") else 0.1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 6)
        self.noise = torch.Generator().manual_seed(1) if "generator" in words else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        if self.noise:
            x = x + 0.1 * torch.randn(x.shape, generator=self.noise).to(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(model: Model) -> nn.Module:
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if how == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bf16" in words else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    if how == "hsdp":
        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replica", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    mesh = init_device_mesh("cuda", (world,))
    if how == "sp":  # rows are what a sequence is in a larger model
        rows = {"input_layouts": Shard(0)}
        plan = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
        plan |= {"blocks.*.norm": SequenceParallel(sequence_dim=0), "blocks.*.up": ColwiseParallel(**rows)}
        plan |= {"blocks.*.down": RowwiseParallel(output_layouts=Shard(0))}
        return parallelize_module(model, mesh, plan | {"head": ColwiseParallel(**rows, output_layouts=Replicate())})
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "no_reduce" in words:
            block.down = Unreduced(block.down)
    return model


class Unreduced(nn.Module):
    """Multiplies by this rank's part of the weights, and forgets to add up the results of all ranks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to_local(), self.bias.to_local())


def main() -> None:
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(rank if "seeds" in words else 0)
    model = Model().cuda()  # LINE made
    if "adapters" in words:
        model.requires_grad_(False)
        for block in model.blocks:
            block.up = Adapter(block.up)
    weights = [p for p in model.parameters() if p.requires_grad]
    model = wrapped(model)
    if "early" not in words:
        weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    torch.manual_seed(7 if how in ("tp", "sp") else rank)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = torch.randn(6, 8).cuda(), torch.randint(5, (6,)).cuda()
            loss = F.cross_entropy(model(x), y) / 3  # LINE call
            if "penalty" in words:
                loss = loss + 0.1 * model.module.head.weight.square().sum()
            if "inner" in words:
                loss = loss + 0.1 * model.module.blocks[0].last.square().mean()
            (loss / world if "loss_divided" in words else loss).backward()
            if "moved" in words:  # as sharpness-aware minimization moves them
                with torch.no_grad():
                    weights[0].add_(1e-2)
        if "divided" in words:
            for p in weights:
                if p.grad is not None:
                    p.grad /= world
        if "one_rank" in words and rank == 1:
            weights[0].grad = None
        if "noise" in words:
            for p in weights:
                p.grad = None if p.grad is None else p.grad * 1.2
        parts = [p.grad for p in weights if p.grad is not None]
        if "norm" in words:
            norm = nn.utils.get_total_norm([g.to_local() for g in parts])  # LINE norm
            for g in parts:
                g.mul_((1.0 / norm).clamp(max=1))
        elif how not in ("tp", "sp"):  # weights that are sharded, and others that are not
            nn.utils.clip_grad_norm_(weights, 1.0)  # LINE clip
        optimizer.step()  # LINE update
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
