"""Train a network to recognize the direction of stripes, in a number format of your choice."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from stripes import Net, Stripes


def allow_tf32(allowed):
    """Let an NVIDIA GPU round what products of float32 numbers read to TF32, or forbid it."""
    torch.backends.cudnn.allow_tf32 = allowed  # in convolutions; PyTorch's default is True
    torch.set_float32_matmul_precision("high" if allowed else "highest")  # in matrix products; the default is "highest"


def autocast(precision, device):
    """Return a context in which products are computed in 16 bits, or a context that changes nothing."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def train_one_epoch(model, loader, optimizer, scaler, device, precision):
    model.train()
    loss_sum = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        with autocast(precision, device):
            loss = F.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.item() * len(targets)
    return loss_sum / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, device, precision):
    model.eval()
    correct = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        with autocast(precision, device):
            outputs = model(images)
        correct += (outputs.argmax(dim=1) == targets).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()

    torch.manual_seed(1)
    allow_tf32(args.precision == "tf32")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Stripes(2048, first_seed=0)
    val_set = Stripes(501, first_seed=1_000_000)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, args.batch_size)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        loss = train_one_epoch(model, train_loader, optimizer, scaler, device, args.precision)
        seconds = time.perf_counter() - started
        accuracy = evaluate(model, val_loader, device, args.precision)
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}  {seconds:.1f} s")
        if scaler.is_enabled():
            print(f"scale {scaler.get_scale():,.0f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
