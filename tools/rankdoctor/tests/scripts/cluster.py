"""Reads variables of torchrun and of srun, and one of the site; seeds the GPU; writes as a library in C does."""

import ctypes
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, local_rank = int(os.environ["SLURM_PROCID"]), int(os.environ["LOCAL_RANK"])
assert os.environ["SLURM_OF_OUR_SITE"] == "7"
dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.cuda.set_device(local_rank)
torch.cuda.manual_seed(1)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.rand(8, 4).cuda()).sum().backward()
    optimizer.step()
if rank == 0:
    os.makedirs("new/folder")
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    for name in ("new/folder/inside.bin", "beside.bin"):
        file = ctypes.c_void_p(libc.fopen(name.encode(), b"w"))
        assert file.value, name
        libc.fclose(file)
    with open("new/folder/notes.txt", "w") as notes:
        notes.write("")
    assert sorted(os.listdir("new/folder")) == ["inside.bin", "notes.txt"]
