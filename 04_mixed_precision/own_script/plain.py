"""Train a network to recognize the direction of stripes."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from stripes import Net, Stripes


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
    return loss_sum / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        correct += (model(images).argmax(dim=1) == targets).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Stripes(2048, first_seed=0)
    val_set = Stripes(501, first_seed=1_000_000)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, args.batch_size)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        loss = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - started
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}  {seconds:.1f} s")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
