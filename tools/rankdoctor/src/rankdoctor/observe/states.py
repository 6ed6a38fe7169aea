"""States of models that the script keeps: `state_dict()` returns the weights themselves, and they go on changing."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..trail import note, trail, user_line
from .common import address, patch, quietly

MOST = 16
"""states that are remembered, the newest ones"""


@dataclass
class State:
    """What `state_dict()` has returned, and which weights it shares the memory of."""

    known: "weakref.ref[dict[str, Any]]"
    at: str
    step: int
    versions: dict[str, int]
    """how often each weight had been changed"""


class Kept:
    """The states of this process."""

    states: ClassVar[list[State]] = []


def install() -> None:
    """Remember what `state_dict` returns, and look at it again when it is loaded."""
    patch(nn.Module, "state_dict", _remembering)
    patch(nn.Module, "load_state_dict", _loading)


def _remembering(own: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = own(self, *args, **kwargs)
        if not args and "destination" not in kwargs:  # those of the modules inside
            _remember(self, state, user_line())
        return state

    return state_dict


def _loading(own: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        look_at(state_dict, user_line(), "load", self)
        return own(self, state_dict, *args, **kwargs)

    return load_state_dict


@quietly
def _remember(module: nn.Module, state: Any, at: str) -> None:
    weights = dict(module.named_parameters())
    shared = {
        name: value._version
        for name, value in state.items()
        if type(value) is torch.Tensor and name in weights and address(value) == address(weights[name]) != 0
    }
    if shared:
        Kept.states = [*Kept.states[1 - MOST :], State(weakref.ref(state), at, trail.step, shared)]


@quietly
def look_at(state: Any, at: str, how: str, module: nn.Module | None = None) -> None:
    """Log that a state is saved, or loaded into its own model, whose weights were changed after it was kept."""
    kept = next((one for one in Kept.states if one.known() is state), None)
    if kept is None or kept.step == trail.step:
        return
    present = {name: state[name] for name in kept.versions if type(state.get(name)) is torch.Tensor}
    changed = [name for name, value in present.items() if value._version > kept.versions[name]]
    if module is not None:
        own = {name: address(p) for name, p in module.named_parameters()}
        changed = [name for name in changed if own.get(name) == address(state[name])]
    if changed:
        note("kept_state", at=at, how=how, made=kept.at, began=kept.step, names=changed)
