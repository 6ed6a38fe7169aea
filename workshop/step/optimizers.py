"""The optimizers, by name."""

from typing import Any

import torch
from torch import nn, optim

from workshop.config import TrainConfig
from workshop.errors import UserError


def build_optimizer(
    config: TrainConfig, model: nn.Module, fused: bool = False, capturable: bool = False
) -> optim.Optimizer:
    """Build ``config.optimizer`` over the parameters of ``model``; SGD gets the customary momentum of 0.9.

    Args:
        config: names the optimizer and the learning rate.
        model: has its parameters on the device already.
        fused: update all parameters in one kernel.
        capturable: keep all that a step reads and counts, even the learning rate, on the device, so that a CUDA graph
            can hold the step.

    Raises UserError: the optimizer lacks one of these.
    """
    name = config.optimizer
    parameters = list(model.parameters())
    group = [{"params": parameters, "initial_lr": config.lr}]  # a number: schedules need no kernel to multiply it
    lr = torch.tensor(config.lr, device=parameters[0].device) if capturable else config.lr
    if name == "adadelta":
        if fused:
            raise UserError("--fused true: PyTorch has no fused adadelta; choose another --optimizer, or --fused false")
        return optim.Adadelta(group, lr=lr, capturable=capturable)
    if name == "sgd":
        if capturable and not fused:
            raise UserError("--cuda_graph true with --optimizer sgd needs --fused true, to read the rate on the GPU")
        optimizer = optim.SGD(group, lr=lr, momentum=0.9, fused=fused or None)  # None: PyTorch's own choice
        if fused:  # else a first step that overflows in fp16 leaves the momentum as it lay in memory
            optimizer.state |= {weights: {"momentum_buffer": torch.zeros_like(weights)} for weights in parameters}
        return optimizer
    optimizers = {"adam": optim.Adam, "adamw": optim.AdamW}
    return optimizers[name](group, lr=lr, fused=fused or None, capturable=capturable)


def restore_optimizer(optimizer: optim.Optimizer, saved: dict[str, Any], factor: float) -> None:
    """Load the ``saved`` state into an optimizer of the same kind; its own options, devices and memory formats stay.

    All tensors are copied, so nothing refers to ``saved`` afterwards.
    The learning rate becomes the saved one times ``factor``, in the same tensor if a CUDA graph is to read it there.
    """
    own = optimizer.param_groups
    pairs = list(zip(own, saved["param_groups"], strict=True))
    # These two options decide on which device the count of steps belongs; all others stay as they are.
    groups = [theirs | {name: mine.get(name) for name in ("fused", "capturable")} for mine, theirs in pairs]
    optimizer.load_state_dict({"state": optimizer.state_dict()["state"] | saved["state"], "param_groups": groups})
    optimizer.param_groups = own
    for mine, theirs in pairs:
        rate = float(theirs["lr"]) * factor
        mine["lr"] = mine["lr"].fill_(rate) if isinstance(mine["lr"], torch.Tensor) else rate
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():  # fused kernels read both as they lie in memory
                state[name] = torch.empty_like(parameter).copy_(value)
            elif isinstance(value, torch.Tensor):  # a count of steps, which may still lie in the checkpoint file
                state[name] = value.clone()
