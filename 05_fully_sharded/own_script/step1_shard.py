"""Train a network to recognize the direction of stripes, with one part of the model on each GPU."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from stripes import Net, Stripes


def ranks_from_env():
    """Return rank, local rank and number of ranks, which the launcher has put into the environment."""
    if "RANK" in os.environ:  # started by torchrun
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:  # started by hand: the only rank
        return 0, 0, 1
    return tuple(int(os.environ[name]) for name in names)


def join_ranks():
    """Take the device of this rank and connect it with the other ranks; return rank, number of ranks, and device."""
    rank, local_rank, world_size = ranks_from_env()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # since PyTorch 2.15: the former backend, which overlaps
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if world_size == 1 else None,  # None: all ranks join at MASTER_ADDR:MASTER_PORT
        device_id=device if device.type == "cuda" else None,
    )
    print(f"rank {rank} of {world_size} on {device}")
    return rank, world_size, device


def shard(model, world_size, device):
    """Cut each weight of the model into as many parts as there are ranks; this rank stores one of them."""
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mean_over_ranks(total, count, device):
    """Return the sum of the totals of all ranks, divided by the sum of their counts."""
    sums = torch.tensor([total, count], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    loss_sum = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_sum += loss.item() * len(targets)
    return mean_over_ranks(loss_sum, len(loader.sampler), device)


@torch.no_grad()
def evaluate(model, loader, samples, device):
    model.eval()
    correct = seen = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        hits = model(images).argmax(dim=1) == targets
        correct += hits[: samples - seen].sum().item()  # without a sample that the sampler has repeated
        seen += len(targets)
    return mean_over_ranks(correct, samples, device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64, help="of each rank")
    args = parser.parse_args()

    rank, world_size, device = join_ranks()
    torch.manual_seed(1)  # the same weights on all ranks
    train_set = Stripes(2048, first_seed=0)
    val_set = Stripes(501, first_seed=1_000_000)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=1, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_sampler = DistributedSampler(val_set, world_size, rank, shuffle=False)  # as many batches on all ranks
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)
    val_samples = len(range(rank, len(val_set), world_size))  # of this rank, without a repeated one
    model = shard(Net(), world_size, device)
    torch.manual_seed(1 + rank)  # other random numbers on each rank, for dropout and augmentation
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        loss = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - started
        accuracy = evaluate(model, val_loader, val_samples, device)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}  {seconds:.1f} s")
            torch.save(whole, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
