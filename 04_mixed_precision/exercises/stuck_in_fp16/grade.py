"""The clipped gradient is the same in every precision and with every scale, and it is still clipped and scaled.

A scale that is much too large makes gradients overflow in fp16: no update may be made of those.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from clinic.runs import Fault, Script

MAX_NORM = 0.5
STEPS = 10
TOO_LARGE = 2**24
"""with this scale, the gradients of the first steps overflow; it is halved each time"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    plain, _ = norms(script, "fp32", 2**16)
    if len(plain) != STEPS:
        yield f"in fp32 it makes {len(plain)} updates in {STEPS} steps"
        return
    for precision, scale in (("fp32", 2**16), ("bf16", 2**16), ("fp16", 2**8), ("fp16", 2**16)):
        found, backward_from = (plain, math.inf) if precision == "fp32" else norms(script, precision, scale)
        where = f"in {precision}" + (f" with the loss scaled by {scale:,}" if precision == "fp16" else "")
        if len(found) < STEPS // 2:
            yield f"{where} it makes {len(found)} updates in {STEPS} steps"
        elif wrong := wrong_norm(found, plain):
            yield f"{where} {wrong}; it should be clipped to {MAX_NORM}"
        elif precision == "fp16" and backward_from < 0.4 * scale:  # the loss is about 2.3 at first
            yield f"in fp16 the backward pass begins at {backward_from:.3g}: the loss is no longer scaled"
        else:
            continue
        return
    try:
        found, _ = norms(script, "fp16", TOO_LARGE)
    except Fault as fault:
        yield f"in fp16, a step whose gradients overflow ends the run instead of being left out: {fault}"
        return
    if not found:
        yield f"in fp16, after gradients have overflowed, no update is made in {STEPS} steps"
    elif len(found) == STEPS or not all(map(math.isfinite, found)):
        yield "in fp16 it makes an update although gradients have overflowed (they are infinite or not numbers)"


def wrong_norm(found: list[float], plain: list[float]) -> str | None:
    """Return which update gets a gradient of the wrong norm; all gradients here are larger before they are clipped."""
    for number, norm in enumerate(found, 1):
        expected = plain[number - 1] if number == 1 else MAX_NORM  # from then on, fp16 rounds to other weights
        tolerance = 0.05 if found is not plain else 0.02
        if not (1 - tolerance) * min(expected, MAX_NORM) < norm < (1 + tolerance) * MAX_NORM:
            return f"the optimizer gets a gradient of norm {norm:.3g} in update {number}"
    return None


def norms(script: Script, precision: str, scale: int) -> tuple[list[float], float]:
    """Return the norms of the gradients that the optimizer gets, and the largest loss that backward began with.

    Raises:
        Fault: it ended with an error and without an update of gradients that overflowed; or in fp16, the model did not
            compute in this format.
    """
    flags = ("--precision", precision, "--batch_size", 32, "--optimizer", "sgd", "--lr", 0.01)
    watch = partial(set_scale, scale=scale)
    run = script.run(*flags, watch=watch, train=32 * STEPS, val=32, keep=True, fail=False)
    found = [update.gradient.norm().item() for update in run[0].updates]
    if run[0].status != 0 and all(map(math.isfinite, found)):
        run = script.run(*flags, watch=watch, train=32 * STEPS, val=32, keep=True)
    outputs = [call.outputs for call in run[0].training if call.outputs is not None]
    if precision == "fp16" and any(scores.dtype != torch.float16 for scores in outputs):
        raise Fault("with --precision fp16, the model does not compute in float16")
    return found, max(run[0].extra or [math.inf])


def set_scale(_: Path, scale: int) -> Callable[[], list[float]]:
    """Have each GradScaler begin with this scale; note what each backward pass begins with; see `Script.run`."""
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
