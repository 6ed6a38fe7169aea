"""Train a network to recognize the direction of stripes, with one part of the model on each GPU; save it in parts."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from stripes import Net, Stripes

CHECKPOINTS = Path("checkpoints")


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


def recompute_in_backward(block):
    """Let a block store only its input for backward; backward then computes the block again."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def build_sharded(rank, world_size, device, bf16, recompute):
    """Return the model, of which this rank stores one part of each weight; rank 0 chooses the initial weights."""
    with torch.device("meta"):  # shapes without memory
        model = Net()
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        if recompute:
            recompute_in_backward(block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # memory for the parts of this rank, with random content
    initial = Net().state_dict() if rank == 0 else {}
    set_model_state_dict(model, initial, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def save(model, optimizer, epoch):
    """Save what the training needs to continue after this epoch. Each rank writes its parts, so all call this."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state, "epoch": epoch}
    dcp.save(state, checkpoint_id=CHECKPOINTS / f"epoch_{epoch}")


def load(model, optimizer, device):
    """Load the newest checkpoint, if there is one; return the number of its epoch, or 0. All ranks call this."""
    complete = [int(file.parent.name.removeprefix("epoch_")) for file in CHECKPOINTS.glob("epoch_*/.metadata")]
    newest = torch.tensor(max(complete, default=0), device=device)
    dist.broadcast(newest, src=0)  # all ranks load what rank 0 has found
    if newest == 0:
        return 0
    weights, optimizer_state = get_state_dict(model, optimizer)  # says which parts this rank needs
    state = {"model": weights, "optimizer": optimizer_state, "epoch": 0}
    dcp.load(state, checkpoint_id=CHECKPOINTS / f"epoch_{newest.item()}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    return state["epoch"]


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
        loss = F.cross_entropy(model(images).float(), targets)
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
    parser.add_argument("--bf16", action="store_true", help="gather weights and compute in 16 bits")
    parser.add_argument("--recompute", action="store_true", help="store less for backward, and compute more")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    args = parser.parse_args()

    rank, world_size, device = join_ranks()
    torch.manual_seed(1 + rank)
    train_set = Stripes(2048, first_seed=0)
    val_set = Stripes(501, first_seed=1_000_000)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=1, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_sampler = DistributedSampler(val_set, world_size, rank, shuffle=False)  # as many batches on all ranks
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)
    val_samples = len(range(rank, len(val_set), world_size))  # of this rank, without a repeated one
    model = build_sharded(rank, world_size, device, args.bf16, args.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    done = load(model, optimizer, device) if args.resume else 0

    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        loss = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - started
        accuracy = evaluate(model, val_loader, val_samples, device)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}  {seconds:.1f} s")
        save(model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
