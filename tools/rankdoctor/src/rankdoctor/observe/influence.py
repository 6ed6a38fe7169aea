"""Influence: the first training batch of a model is evaluated again with one sample, or one token, changed."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..questions import verdicts
from ..trail import note, user_line
from ..verdicts import UNJUDGED, Verdict
from . import copies
from .common import CONFIG, in_transform, patch, state
from .model import _is_model as has_weights

MODELS = 3
"""models that are looked at"""
TARGETS = 8
"""targets of a call that are kept"""


@dataclass
class Call:
    """The first call of a model in training."""

    model: nn.Module | None
    args: tuple
    kwargs: dict[str, Any]
    at: str
    cls: str
    reason: str = ""
    targets: list[torch.Tensor] = field(default_factory=list)


class Calls:
    """The calls that are still to be judged, and the models that were called."""

    waiting: list[Call] = []  # noqa: RUF012  (one for the process, as the class is)
    seen: set[int] = set()  # noqa: RUF012


def install() -> None:
    """Observe the first call of each model, and the targets of the losses that follow."""
    if not CONFIG.influence:
        return
    copies.install()
    patch(nn.Module, "__call__", _call)
    for name in ("cross_entropy", "nll_loss"):
        patch(nn.functional, name, _loss)
    patch(torch.autograd, "backward", _backward)
    register_optimizer_step_pre_hook(_before_step)


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_new(module):
            remember(module, args, kwargs)
        return own(module, *args, **kwargs)

    return call


def is_new(module: nn.Module) -> bool:
    """Return whether this is the first training call of a model, from outside of other models."""
    if state.depth or state.in_backward or state.observing or state.loading or len(Calls.seen) >= MODELS:
        return False
    trains = module.training and torch.is_grad_enabled() and not in_transform()
    return trains and id(core_of(module)) not in Calls.seen and has_weights(module)


def core_of(module: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def remember(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Copy a model and its inputs, before the call: of a sharded model on all ranks, which rank 0 then keeps."""
    core = core_of(module)
    Calls.seen.add(id(core))
    if copies.rank() and not copies.is_sharded(core):
        return
    call = Call(None, (), {}, user_line(), type(core).__name__.removeprefix("FSDP"))
    with copies.aside():
        try:
            model = copies.plain_copy(core)
            args, kwargs = copies.copied((args, kwargs))
            call.model, call.args, call.kwargs = model, args, kwargs
        except Exception as error:
            call.reason = str(error) if isinstance(error, copies.NoCopy) else repr(error)[:200]
    if not copies.rank():
        Calls.waiting.append(call)


def _loss(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if Calls.waiting and not (state.observing or in_transform()) and len(Calls.waiting[-1].targets) < TARGETS:
            with copies.aside():
                Calls.waiting[-1].targets.append(copies.full(target))
        return own(input, target, *args, **kwargs)

    return loss


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        if not state.observing:
            judge_waiting()
        own(*args, **kwargs)

    return backward


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    judge_waiting()


def judge_waiting() -> None:
    """Judge the calls that were remembered: now their losses, and so their targets, are known."""
    while Calls.waiting:
        call = Calls.waiting.pop(0)
        began = time.perf_counter()
        with copies.aside(), copies.without_collectives():  # rank 0 alone computes this
            found = judged(call)
        seconds = round(time.perf_counter() - began, 3)
        for one in found:
            note("influence", at=call.at, cls=call.cls, **vars(one), seconds=seconds)


def judged(call: Call) -> list[Verdict]:
    """Return the verdicts on a call: computed in 32 bits, or in the precision of the script if the model needs that."""
    if call.model is None:
        return [
            Verdict(name, UNJUDGED, call.reason) for name in ("random", "samples", "future", "documents", "padding")
        ]
    end = None if CONFIG.end_of_text < 0 else CONFIG.end_of_text
    named = [v for k, v in call.kwargs.items() if isinstance(v, torch.Tensor) and ("label" in k or "target" in k)]
    found: list[Verdict] = []
    for dtype in (None, torch.bfloat16):  # a model that casts its own activations needs autocast
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            targets = [*call.targets, *named]
            found = verdicts(call.model, call.args, call.kwargs, targets, causal=CONFIG.causal, end_of_text=end)
        if not all("a call of the model" in one.text for one in found):
            break
    return found
