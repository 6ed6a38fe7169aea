"""Train a small network with batch norm and grid_sample, and print the sums of its weights.

On two GPUs, SyncBatchNorm makes the same of the two halves of the batch as batch norm of the whole batch on the CPU.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x = F.grid_sample(x, grid, align_corners=True)
        return self.linear(F.relu(self.norm(self.conv(x))).mean((2, 3)))


torch.manual_seed(0)
net = Net()
batch = [torch.randn(8, 3, 6, 6), torch.rand(8, 6, 6, 2) * 2 - 1, torch.arange(8) % 2]
model: nn.Module = net
if torch.cuda.device_count() > 1:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    model = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    batch = [tensor[4 * rank : 4 * rank + 4].cuda() for tensor in batch]
elif torch.cuda.is_available():
    model = net.cuda()
    batch = [tensor.cuda() for tensor in batch]
optimizer = torch.optim.SGD(net.parameters(), 0.5)
for _ in range(5):
    loss = F.cross_entropy(model(*batch[:2]), batch[2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if not dist.is_initialized() or dist.get_rank() == 0:
    print(*(f"{p.detach().double().sum().item():.5f}" for p in (*net.parameters(), *net.buffers())))
