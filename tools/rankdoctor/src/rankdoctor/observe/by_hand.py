"""Updates that the script makes itself, without an optimizer of torch: weights that have changed since a backward pass.

They are seen at the next training call of their model. Before it, nobody knows whether the script has changed all
weights; and the gradients are set to zero by then, so the events have none.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..trail import note
from . import optimizer
from .common import has_memory, in_transform, optimizers, patch, quietly, state, sums
from .influence import core_of
from .model import _is_model as has_weights
from .model import kept_buffers, name_parameters
from .models import models


@dataclass
class Watched:
    """A model, its weights at its last training call, and what the other observers take for its optimizer."""

    model: nn.Module
    weights: list[list[float] | None]
    optimizer: "ByHand"


class ByHand:
    """What an update by hand has of an optimizer: the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]
        self.state: dict[Any, Any] = {}


watched: dict[int, Watched] = {}
"""by the ids of the models"""
numbers: set[int] = set()
"""of what the other observers take for optimizers"""


def install() -> None:
    """Observe the training calls of models, until an optimizer of torch makes an update."""
    patch(nn.Module, "__call__", _call)


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_outer = not (state.depth or state.in_backward or state.observing or state.loading)
        if is_outer and torch.is_grad_enabled() and not has_optimizer() and has_weights(module) and not in_transform():
            look_for_update(core_of(module))
        return own(module, *args, **kwargs)

    return call


def has_optimizer() -> bool:
    """Return whether an optimizer of torch has made an update, also one that is gone; then forget the models."""
    if optimizers.known.keys() - numbers:
        watched.clear()
        return True
    return False


def look_for_update(model: nn.Module) -> None:
    """Log an update if the weights of a model have changed since its last call, and there was a backward pass."""
    number = note_change(model)
    if number is None:
        return
    by_hand = cast(Optimizer, watched[id(model)].optimizer)
    optimizer.note_after(by_hand)
    optimizer.count_step()


@quietly
def note_change(model: nn.Module) -> int | None:
    """Log the weights before an update since the last call, and return the number of the optimizer; None: no update."""
    parameters = list(model.parameters())[: optimizer.MOST_PARAMETERS]
    if any(hasattr(p, "device_mesh") or not has_memory(p) for p in parameters):
        return None
    weights = [sums(p) for p in parameters]
    last = watched.get(id(model))
    if last is None or last.model is not model:
        watched[id(model)] = Watched(model, weights, ByHand(model))
        return None
    before, last.weights = last.weights, weights
    if not models.backwards or before == weights or len(before) != len(weights):
        return None
    name_parameters()
    by_hand = cast(Optimizer, last.optimizer)
    number = optimizer.number_of(by_hand)
    numbers.add(number)
    count = optimizers.updates[number] = optimizers.updates.get(number, -1) + 1
    optimizers.held |= {id(p) for p in parameters}
    optimizers.became = {}
    note(
        "gradients",
        optimizer=number,
        count=count,
        made="",
        at=models.backwards[-1],
        closure=False,
        made_lr=[],
        gradients={},
        weights={models.names.get(id(p), f"?{i}"): before[i] for i, p in enumerate(parameters)},
        unsharded=[],
        lr=[],
        state=0,
        scaler=None,
        dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        factor=None,
        others={},
        kept_buffers=kept_buffers(),
        kept=None,
    )
    return number
