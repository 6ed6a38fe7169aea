"""Which gradients are too small, or too large, for 16 bits, and what scaling the loss changes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer import Batch
from workload import LESSON

EXPONENTS = range(-60, 17)
"""powers of two of the histogram; the few gradients beyond count at its ends"""


@dataclass(frozen=True)
class Format:
    """A 16-bit format: what rounds to zero, what loses digits, what overflows."""

    dtype: torch.dtype

    @property
    def smallest(self) -> float:
        """The smallest number above zero; what is at most half of it becomes zero."""
        return torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps

    def shares(self, magnitudes: torch.Tensor) -> dict[str, float]:
        """Return which shares of these numbers above zero, (n,), become zero, are kept coarsely, and overflow."""
        info = torch.finfo(self.dtype)
        zero = magnitudes <= self.smallest / 2
        coarse = ~zero & (magnitudes < info.smallest_normal)
        return {
            "zero": zero.double().mean().item(),
            "coarse": coarse.double().mean().item(),
            "overflow": (magnitudes > info.max).double().mean().item(),
        }


def collect_gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes, (n,) float32, of all gradients above zero that one backward pass in float32 makes.

    They are those of the outputs of all layers, which mixed precision keeps in 16 bits, and those of the weights.
    """
    found: list[torch.Tensor] = []

    def collect(_: nn.Module, __: tuple, outputs: torch.Tensor) -> None:
        outputs.register_hook(lambda gradient: found.append(gradient.detach().abs().flatten()))

    layers = [module for module in model.modules() if not list(module.children())]
    handles = [layer.register_forward_hook(collect) for layer in layers]
    LESSON.loss_function(model(inputs), targets).backward()
    for handle in handles:
        handle.remove()
    found += [weights.grad.abs().flatten() for weights in model.parameters()]
    model.zero_grad()
    magnitudes = torch.cat(found)
    return magnitudes[magnitudes > 0].float()


def histogram(magnitudes: torch.Tensor) -> list[float]:
    """Return the share of the numbers whose magnitude lies from 2^e to below 2^(e+1), for each e of `EXPONENTS`."""
    exponents = torch.frexp(magnitudes).exponent - 1
    counts = torch.bincount(exponents.clamp(EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0], minlength=len(EXPONENTS))
    return (counts / len(magnitudes)).tolist()


def scaled_shares(magnitudes: torch.Tensor, scales: list[float]) -> list[dict[str, Any]]:
    """Return what becomes of the gradients in fp16 with the loss times each of ``scales``, and in bf16."""
    rows = [{"format": "fp16", "scale": scale} | Format(torch.float16).shares(magnitudes * scale) for scale in scales]
    return [*rows, {"format": "bf16", "scale": 1.0} | Format(torch.bfloat16).shares(magnitudes)]


def lost_weight_gradients(model: nn.Module, batch: Batch, dtype: torch.dtype, scaled: bool) -> float:
    """Return the share of the weights' gradients that are zero after a real backward pass in 16 bits.

    With ``scaled``, the loss is multiplied by what `torch.amp.GradScaler` begins with.
    """
    inputs, targets = batch
    scaler = torch.amp.GradScaler(inputs.device.type, enabled=scaled)
    with torch.autocast(inputs.device.type, dtype):
        loss = LESSON.loss_function(model(inputs), targets)
    scaler.scale(loss).backward()
    gradients = torch.cat([weights.grad.flatten() for weights in model.parameters()])
    model.zero_grad()
    return (gradients == 0).double().mean().item()
