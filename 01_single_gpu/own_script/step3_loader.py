"""Train a network to recognize the direction of stripes; load batches while the model trains."""

import argparse
import time
from functools import partial

import torch
import torch.nn.functional as F
from line_profiler import profile
from torch import nn
from torch.utils.data import DataLoader

from stripes import Net, Stripes


def wait_for(device):
    """Wait until the device has done everything that was queued; on a CPU, nothing is."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@profile
def train_step(model, optimizer, device, images, targets):
    images = images.to(device, non_blocking=True)
    targets = targets.to(device, non_blocking=True)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@profile
def train_one_epoch(model, loader, optimizer, device, timers):
    model.train()
    loss_sum = torch.zeros((), device=device)
    load = compute = 0.0
    before = time.perf_counter()
    for images, targets in loader:
        loaded = time.perf_counter()
        loss = train_step(model, optimizer, device, images, targets)
        loss_sum += loss.detach() * len(targets)
        if timers:
            wait_for(device)
            computed = time.perf_counter()
            load += loaded - before
            compute += computed - loaded
            before = computed
    if timers:
        steps = len(loader)
        print(f"load {1000 * load / steps:.2f} ms  compute {1000 * compute / steps:.2f} ms per step")
    return loss_sum.item() / len(loader.dataset)


def throughput(batches, step, device):
    """Return samples per second; the first three batches, with which everything starts, are not counted."""
    assert len(batches) > 3, "an epoch has too few batches to measure"
    for number, (images, targets) in enumerate(batches, start=1):
        step(images, targets)
        if number == 3:
            wait_for(device)
            samples, started = 0, time.perf_counter()
        elif number > 3:
            samples += len(targets)
    wait_for(device)
    return samples / (time.perf_counter() - started)


def benchmark(loader, step, device):
    """Print samples/s of the loader alone (IO), of the step alone (SYNTHETIC), and of both (FULL)."""
    one_batch = [next(iter(loader))] * len(loader)
    cases = {"IO": (loader, lambda *batch: None), "SYNTHETIC": (one_batch, step), "FULL": (loader, step)}
    for name, (batches, what) in cases.items():
        trials = sorted(throughput(batches, what, device) for _ in range(3))
        print(f"{name:9}  {trials[1]:9,.0f} samples/s  ({trials[0]:,.0f} to {trials[2]:,.0f})")


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = torch.zeros((), device=device)
    for images, targets in loader:
        images = images.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        correct += (model(images).argmax(dim=1) == targets).sum()
    return correct.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timers", action="store_true")
    parser.add_argument("--benchmark", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Stripes(2048, first_seed=0)
    val_set = Stripes(501, first_seed=1_000_000)
    loading = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,  # processes that prepare batches while this one trains
        "pin_memory": device.type == "cuda",  # memory from which a GPU copies while the CPU goes on
        "persistent_workers": args.workers > 0,  # keep the processes from one epoch to the next
        "prefetch_factor": 4 if args.workers > 0 else None,  # batches that each of them prepares ahead
    }
    train_loader = DataLoader(train_set, shuffle=True, **loading)
    val_loader = DataLoader(val_set, **loading)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    if args.benchmark:
        benchmark(train_loader, partial(train_step, model, optimizer, device), device)
        return
    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        loss = train_one_epoch(model, train_loader, optimizer, device, args.timers)
        seconds = time.perf_counter() - started
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}  {seconds:.1f} s")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
