"""Derive seeds from seed, epoch, step and so on, so that a resumed run draws the same random numbers."""

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """Return a seed derived from numbers of 0 or more: a different one for different numbers, equal on all machines.

    `numpy.random.SeedSequence` mixes all bits of all numbers. With their sum, seed 1 in step 2 would be seed 2 in step
    1. Source: https://numpy.org/doc/stable/reference/random/parallel.html
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_generators(device: torch.device, *numbers: int) -> None:
    """Seed the generators of the CPU and of ``device`` with `seed_of` numbers.

    `torch.manual_seed` does this for all devices. But with a PyTorch for GPUs on a machine without one, it takes
    0.1 ms, too much for each step of a small model.
    """
    seed = seed_of(*numbers)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:  # of all GPUs, because DataParallel uses all of them
            generator.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
