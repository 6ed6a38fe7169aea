"""What the ranks of an experiment compute together."""

import torch
import torch.distributed as dist


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a number () over all ranks, on all of them; added up in 64 bits."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
