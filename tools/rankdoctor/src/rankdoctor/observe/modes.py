"""Frozen parts of a model that the script puts into evaluation mode, and train() of the whole puts back."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import swa_utils

from ..trail import note, user_line
from .common import patch, quietly, state

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass
class Modes:
    """What the script has put into evaluation mode."""

    depth: int = 0
    """nested calls of train(): a module calls it for each of its parts"""
    meant: "weakref.WeakKeyDictionary[nn.Module, str]" = field(default_factory=weakref.WeakKeyDictionary)
    """modules of which the script has called eval(), and the line"""
    undone: "weakref.WeakKeyDictionary[nn.Module, str]" = field(default_factory=weakref.WeakKeyDictionary)
    """modules that the train() of an outer module has put back into training mode, and its line"""
    noted: "weakref.WeakSet[nn.Module]" = field(default_factory=weakref.WeakSet)


modes = Modes()


def install() -> None:
    """Observe `train`, which `eval` calls, and what is called then."""
    patch(nn.Module, "train", _train)
    patch(swa_utils, "update_bn", _unobserved)
    nn.modules.module.register_module_forward_pre_hook(_look)


def _unobserved(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that calls a model in training mode and is neither training nor validation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, state.observing = state.observing, True
        try:
            return own(*args, **kwargs)
        finally:
            state.observing = before

    return call


def _train(own: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: nn.Module, mode: bool = True) -> Any:
        modes.depth += 1
        try:
            result = own(self, mode)
        finally:
            modes.depth -= 1
        if not modes.depth and not state.observing:
            remember(self, mode)
        return result

    return train


@quietly
def remember(module: nn.Module, mode: bool) -> None:
    """Remember which module the script has put into evaluation mode, or which of them are in training mode again."""
    if not mode:
        modes.meant[module] = user_line()
        modes.undone.pop(module, None)
        return
    modes.meant.pop(module, None)
    inside = [part for part in module.modules() if part in modes.meant and part.training]
    modes.undone.update((part, user_line()) for part in inside)


def _look(module: nn.Module, _: Any) -> None:
    if not modes.meant or module not in modes.meant or module in modes.noted or state.observing or not state.training:
        return
    if module.training == (module in modes.undone):
        modes.noted.add(module)
        look(module)


@quietly
def look(module: nn.Module) -> None:
    """Log a frozen module that is called in training, and in which mode, if that changes what it computes."""
    random = [m for m in module.modules() if isinstance(m, DROPOUTS) and m.p > 0]
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    weights = list(module.parameters())
    if weights and not any(p.requires_grad for p in weights) and (random or norms):
        note(
            "frozen_mode",
            cls=type(module).__name__,
            at=modes.undone.get(module, modes.meant[module]),
            made=modes.meant[module],
            train=module.training,
            random_layers=len(random),
            local_norms=len(norms),
        )
