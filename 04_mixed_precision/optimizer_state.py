"""Loading the state of an optimizer that another run, perhaps with other options, has saved."""

from typing import Any

import torch
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load the ``saved`` state, but keep this optimizer's own options, devices and memory formats.

    `Optimizer.load_state_dict` alone takes ``fused`` and ``capturable`` from the run that saved, puts the counters of
    the steps where those options need them, and replaces the tensor of the learning rate that a CUDA graph reads.
    """
    own = optimizer.param_groups
    pairs = list(zip(own, saved["param_groups"], strict=True))
    # These two options decide on which device the counter of the steps must be.
    groups = [theirs | {name: mine.get(name) for name in ("fused", "capturable")} for mine, theirs in pairs]
    optimizer.load_state_dict({"state": optimizer.state_dict()["state"] | saved["state"], "param_groups": groups})
    optimizer.param_groups = own
    for mine, theirs in pairs:
        lr = float(theirs["lr"])
        mine["lr"] = mine["lr"].fill_(lr) if isinstance(mine["lr"], torch.Tensor) else lr
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():  # fused kernels read weights and state in one order
                state[name] = torch.empty_like(parameter).copy_(value)
