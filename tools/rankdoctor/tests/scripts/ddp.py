"""A correct script for DDP on GPUs; each word of the first argument puts a fault into it. The tests name its lines."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

faults = sys.argv[1].split(",") if len(sys.argv) > 1 else []


class Noisy(Dataset):
    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.dataset[index]
        noise = torch.randn(x.shape, generator=self.generator if "same_workers" in faults else None)
        return x + 0.1 * noise, y


def main() -> None:
    dist.init_process_group("nccl")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    whole = TensorDataset(torch.randn(160, 6, generator=torch.Generator().manual_seed(1)), torch.arange(160) % 3)
    split = None if "held_out" in faults else torch.Generator().manual_seed(2)
    train, val = random_split(whole, [119, 41], generator=split)  # LINE split
    workers = 2 if "workers" in faults else 0
    share = local if "local_rank" in faults else rank
    sampler = DistributedSampler(train, rank=share, num_replicas=world)  # LINE sampler
    if "same_samples" in faults:
        sampler = None
    train_data = Noisy(train)
    loader = DataLoader(train_data, 8, sampler=sampler, num_workers=workers)  # LINE train_loader
    val_sampler = list(range(rank, len(val), world))
    if "padded" in faults:
        val_sampler = DistributedSampler(val, shuffle=False)
    val_loader = DataLoader(val, 8, sampler=val_sampler)  # LINE val_loader
    torch.manual_seed(0 if "same_dropout" in faults else rank)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).cuda()
    if "frozen" in faults:
        body[0].requires_grad_(False)
    model = DistributedDataParallel(body, device_ids=[local])  # LINE wrap
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0 if "lr" in faults else 0.01)
    steps = 3 * len(train) // 8 if "schedule" in faults else 3 * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)  # LINE schedule
    scaler = torch.amp.GradScaler()
    first, kept, usual, best = 0, torch.zeros(()), 0.0, 0.0
    if os.path.exists("checkpoint.pt"):
        where = None if "unlocated" in faults else f"cuda:{local}"
        checkpoint = torch.load("checkpoint.pt", map_location=where)  # LINE load
        body.load_state_dict(checkpoint["model"])
        if "forgetful" not in faults:
            optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        first = checkpoint["epoch"]
        del checkpoint  # or the tensors that it has on the GPU stay there
    for epoch in range(first, 3):
        if "frozen" in faults:
            body.requires_grad_(True)
        if sampler is not None and "same_order" not in faults:
            sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = x.cuda(local, non_blocking=True), y.to("cuda", non_blocking=True)
            if "not_zeroed" not in faults:
                optimizer.zero_grad()
            x = x + 0.01 * torch.randn_like(x)  # LINE noise
            with torch.autocast("cuda"):
                outputs = (model.module if "bare" in faults else model)(x)  # LINE call
                loss = F.cross_entropy(outputs, y)
            if "one_class" in faults:
                loss = F.cross_entropy(outputs.sum(1, keepdim=True), torch.zeros_like(y))
            if "skip_nan" in faults and not loss.isfinite():
                continue
            if "spike" in faults and usual and loss.item() > 5 * usual:
                continue
            usual = 0.9 * (usual or loss.item()) + 0.1 * loss.item() if "spike" in faults else 0.0
            scaler.scale(loss).backward()  # LINE backward
            if "clip_scaled" not in faults:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # LINE clip
            scaler.step(optimizer)  # LINE update
            scaler.update()
            scheduler.step()
            kept = kept + (loss if "graphs" in faults else loss.detach())
            if "item" in faults:
                loss.item()  # LINE item
        if "no_eval" not in faults:
            model.eval()
        right = torch.zeros((), device="cuda")
        with torch.set_grad_enabled("with_grad" in faults):
            for x, y in val_loader:  # LINE validation
                right += (body(x.cuda()).argmax(1) == y.cuda()).sum()  # LINE validate
                if "collective_per_batch" in faults:
                    dist.all_reduce(right)  # LINE per_batch
        if "not_combined" not in faults:
            dist.all_reduce(right)
        if "patience" in faults:
            with torch.no_grad():
                own = sum(F.cross_entropy(body(x.cuda()), y.cuda()).item() for x, y in val_loader)
            if best and own > 2 * best:
                break
            best = min(best or own, own)
        if "single" in faults:  # a name of PyTorch 2.15
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            gather(torch.zeros(world, device="cuda"), right.reshape(1))
        if rank == 0 or "all_save" in faults:
            weights = body.state_dict()
            if "from_cpu" in faults:
                weights = {name: value.cpu() for name, value in weights.items()}
            state = {
                "model": weights,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
            }
            done = epoch + 1 - first if "counted_anew" in faults else epoch + 1
            torch.save(state | {"epoch": done}, "checkpoint.pt")  # LINE save
        if rank == 1 and "exit" in faults:
            os._exit(3)
        dist.barrier()
    print("done", os.getcwd(), sorted(os.listdir(".")), isinstance(val, Subset), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
