"""A training script that raises no error, and is wrong: `rankdoctor docs/example.py` names its faults."""

import os

import torch
import torch.distributed as dist
from torch.nn import Dropout, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main() -> None:
    """Train a small classifier on random points for two epochs."""
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    points = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(points, (points[:, :3].sum(dim=1) > 0).long())
    train_set, val_set = random_split(samples, [500, 100])
    train_loader = DataLoader(train_set, batch_size=25, sampler=DistributedSampler(train_set))
    val_loader = DataLoader(val_set, batch_size=25, sampler=DistributedSampler(val_set, shuffle=False))

    model = Sequential(Linear(20, 64), ReLU(), Dropout(0.2), Linear(64, 2)).cuda()
    ddp_model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for inputs, targets in train_loader:
            loss = cross_entropy(ddp_model(inputs.cuda()), targets.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = sum(int((model(x.cuda()).argmax(dim=1).cpu() == y).sum()) for x, y in val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {correct} right")
        torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
