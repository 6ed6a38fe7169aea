"""The clipped gradient is the same in every precision and with every scale, and it is still clipped and scaled."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from clinic.observe import Script

MAX_NORM = 0.5


def grade(script: Script) -> Iterator[str]:
    plain = first_norm(script, "fp32", 2**16)[0]
    if not 0.98 * MAX_NORM < plain < 1.02 * MAX_NORM:
        yield f"in fp32 the optimizer gets a gradient of norm {plain:.3g}, but it should be clipped to {MAX_NORM}"
    for scale in (2**8, 2**16):
        norm, backward_from = first_norm(script, "fp16", scale)
        if not 0.95 * plain < norm < 1.05 * plain:
            yield (
                f"in fp16 with the loss scaled by {scale:,} the optimizer gets a gradient of norm {norm:.3g}, "
                f"in fp32 one of {plain:.3g}"
            )
        if backward_from < 0.4 * scale:  # the loss is about 2.3 at first; a scale that was too large is halved
            yield f"in fp16 the backward pass begins at {backward_from:.3g}: the loss is no longer scaled"


def first_norm(script: Script, precision: str, scale: int) -> tuple[float, float]:
    """Return the norm of the first gradient that the optimizer gets, and the largest loss that backward began with."""

    def watch(_: Path) -> Callable[[], list[float]]:
        own_init, own_backward = torch.amp.GradScaler.__init__, torch.autograd.backward
        began: list[float] = []

        def init(self: torch.amp.GradScaler, *arguments: object, **keywords: object) -> None:
            own_init(self, *arguments, **keywords)
            self._init_scale = float(scale)

        def backward(tensors: object, *arguments: object, **keywords: object) -> None:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
            began.append(float(first.detach().float().max()))
            own_backward(tensors, *arguments, **keywords)

        torch.amp.GradScaler.__init__, torch.autograd.backward = init, backward
        return lambda: began

    rank = script.run("--precision", precision, "--batch_size", 32, watch=watch, train=128, val=32)[0]
    return rank.updates[0].gradient.norm().item(), max(rank.extra)
