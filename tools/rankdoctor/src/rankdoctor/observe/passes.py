"""What becomes of the gradients of each backward pass: used, left or thrown away; and what recomputing changes."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..trail import note, trail, user_line
from .common import local, optimizers, patch, quietly, state
from .models import models

FIRST = 3
"""weights of an optimizer, at its begin and at its end, of which the gradients are followed"""
MOST_VALUES = 65_536
MOST_PASSES = 400
"""backward passes that are looked at"""
MOST_NAMES = 20
MOST_SPENT = 50


@dataclass
class Pass:
    """A backward pass whose gradients no update has used yet."""

    at: str
    held: dict[int, float]
    """optimizers that have its gradients, with the sum of their first weights at that time"""
    for_inputs: bool
    """whether the script wants gradients of the inputs, as an adversarial attack does"""


@dataclass
class Passes:
    """The backward passes since the last update."""

    open: list[Pass] = field(default_factory=list)
    spent: list[Pass] = field(default_factory=list)
    """passes that an update of an optimizer has used, and whose gradients others still have"""
    thrown: list[tuple[str, str]] = field(default_factory=list)
    """lines of a backward pass, and of what set its gradients to zero before an update could use them"""
    zeroed_at: dict[int, str] = field(default_factory=dict)
    """of each optimizer: the last line that set its gradients to zero"""
    vectors: dict[int, list[float]] = field(default_factory=dict)
    """of each optimizer: the sizes of its first gradients after the last backward pass"""
    number: int = 0
    changed: dict[str, None] = field(default_factory=dict)
    """buffers that changed in backward passes since the last update"""
    fresh: bool = False
    """whether no weight of a wrapped model had a gradient before the last pass"""
    remade: bool = False
    """whether the script has made the gradients itself, before it added them up over the ranks"""
    reduced: bool = False
    """whether it has begun to add them up, since the last pass"""
    checkpoints: set[tuple[str, bool]] = field(default_factory=set)


passes = Passes()


def install() -> None:
    """Observe what sets gradients to zero, and checkpointing of activations."""
    patch(Optimizer, "zero_grad", _zeroing(lambda optimizer: [optimizer]))
    patch(nn.Module, "zero_grad", _zeroing(_optimizers_of))
    patch(torch.autograd, "backward", _backward)
    patch(importlib.import_module("torch.utils.checkpoint"), "checkpoint", _checkpoint)


def _known() -> Iterator[tuple[int, Optimizer]]:
    for number, known in optimizers.known.items():
        if one := known():
            yield number, one


def _optimizers_of(module: nn.Module) -> list[Optimizer]:
    inside = {id(p) for p in module.parameters()}
    return [one for _, one in _known() if any(id(p) in inside for p in _first(one))]


def _first(optimizer: Optimizer) -> list[torch.Tensor]:
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return weights[:FIRST] + weights[max(FIRST, len(weights) - FIRST) :]


def _zeroing(concerned: Callable[[Any], list[Optimizer]]) -> Callable[[Callable], Callable]:
    def wrap(own: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(thing: Any, *args: Any, **kwargs: Any) -> None:
            own(thing, *args, **kwargs)
            at = user_line()
            for number, one in _known():
                if any(one is other for other in concerned(thing)):
                    passes.zeroed_at[number] = at

        return zero_grad

    return wrap


def _sizes(optimizer: Optimizer) -> list[float]:
    """Return the size of each of the first gradients."""
    return [0.0 if p.grad is None else _size(p.grad) for p in _first(optimizer)]


def _size(gradient: torch.Tensor) -> float:
    """Return the sum of some absolute values; of all if these are zero, as in the gradient of an embedding."""
    part = _some(gradient)
    return float(part.double().abs().sum()) or float(local(gradient).abs().sum())


def _some(tensor: torch.Tensor) -> torch.Tensor:
    part = local(tensor.detach())
    flat = (part.coalesce().values() if part.is_sparse else part).flatten()
    return flat[:: 1 + flat.numel() // MOST_VALUES]


def _weights(optimizer: Optimizer) -> float:
    return sum(float(_some(p).double().sum()) for p in _first(optimizer) if not p.is_meta)


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        if state.in_backward:
            return own(*args, **kwargs)
        versions = begin()
        try:
            own(*args, **kwargs)
        except Exception:
            end_early(user_line())
            raise
        return end(versions, user_line())

    return backward


@quietly
def begin() -> dict[str, int]:
    """Note, before a backward pass, which gradients were thrown away; return the versions of all buffers."""
    if passes.number < MOST_PASSES:
        for number, one in _known():
            passes.vectors[number] = _sizes(one)
            if not any(passes.vectors[number]):
                _drop(number, one)
        passes.fresh = all(p.grad is None for _, p in _named(_wrapped_models()))
    return _versions()


def _drop(number: int, optimizer: Optimizer) -> None:
    """Note that the gradients of an optimizer are zero: what passes left there is gone."""
    for one in passes.spent:
        one.held.pop(number, None)
    passes.spent = [one for one in passes.spent if one.held]
    for one in passes.open:
        if number not in one.held:
            continue
        before = one.held.pop(number)
        if _weights(optimizer) != before:  # the script has moved the weights by these gradients itself
            one.held = {-1: 0.0}
        elif not one.held and not one.for_inputs:
            passes.thrown.append((one.at, passes.zeroed_at.get(number, "")))
    passes.open = [one for one in passes.open if one.held]


@quietly
def end(versions: dict[str, int] | None, at: str) -> None:
    """Note, after a backward pass, which optimizers got gradients, and which weights and buffers got what."""
    passes.number += 1
    passes.reduced = False
    if passes.number < MOST_PASSES:
        held = {}
        for number, one in _known():
            now = _sizes(one)
            if now != passes.vectors.get(number, [0.0] * len(now)) and any(now):
                held[number] = _weights(one)
            passes.vectors[number] = now
        if held:
            passes.open.append(Pass(at, held, models.for_inputs))
        _note_unused(at)
    models.for_inputs = False
    for name, version in _versions().items():
        if versions and versions.get(name, version) != version:
            passes.changed[name] = None


def _note_unused(at: str) -> None:
    """Log the weights of wrapped models that got no gradient in the first pass since gradients were removed.

    A model of which no weight got one had no part in this pass, such as the generator in a pass of the critic.
    """
    part = [model for model in _wrapped_models() if any(p.grad is not None for p in model.parameters())]
    without = [name for name, p in _named(part) if p.grad is None]
    if passes.fresh and part:
        note("unused", number=passes.number - 1, at=at, names=without[:MOST_NAMES], missing=len(without))


@quietly
def end_early(at: str) -> None:
    """Note what a backward pass has done that ends by an error, such as waiting for a rank that is gone."""
    passes.number += 1
    _note_unused(at)


def _wrapped_models() -> list[nn.Module]:
    return [model for model in models.known if id(model) in models.inside]


def _named(of: list[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for model in of for name, p in model.named_parameters() if p.requires_grad]


def _versions() -> dict[str, int]:
    if trail.step > 20:
        return {}
    trained = [model for model in models.known if model.training]
    found = {
        name: buffer._version
        for model in trained
        for name, buffer in model.named_buffers()
        if not buffer.is_inference()
    }
    if passes.checkpoints:  # then counters in Python are counted twice, too
        for name, module in (pair for model in trained for pair in model.named_modules()):
            found |= {
                f"{name}.{key} (a number)": hash(value)
                for key, value in vars(module).items()
                if type(value) in (int, float)
            }
    return found


def _is_remade(number: int, now: list[float]) -> bool:
    """Return whether the script has made the gradients itself, of those of several passes.

    Clipping, and the factor of a GradScaler, change all of them alike.
    """
    ratios = [a / b for a, b in zip(now, passes.vectors.get(number, []), strict=False) if b]
    return bool(ratios) and max(ratios) > 1.01 * min(ratios)


@quietly
def before_reduction() -> None:
    """Look, before the script adds up the first gradient over the ranks, whether it has made the gradients itself."""
    if not passes.reduced:
        passes.reduced = True
        passes.remade = any(_is_remade(number, _sizes(one)) for number, one in _known())


def at_step(number: int, optimizer: Optimizer) -> dict[str, object]:
    """Return, before an update, what became of the backward passes since the last one."""
    now = _sizes(optimizer)
    if not any(now):
        _drop(number, optimizer)
    remade = passes.remade or (not optimizers.reduced and _is_remade(number, now))
    event = {
        "thrown": [] if remade else passes.thrown[:50],
        "followed": 0 if remade else sum(number in one.held for one in passes.open),
        "changed_in_backward": list(passes.changed)[:MOST_NAMES],
    }
    fresh = [one for one in passes.open if number in one.held]
    left = [one for one in passes.spent if number in one.held]
    event["left"] = [left[0].at, fresh[-1].at] if fresh and left and left[0].at != fresh[-1].at else []
    passes.open = [one for one in passes.open if number not in one.held]
    for one in (*fresh, *left):
        del one.held[number]
    passes.spent = [one for one in (*passes.spent, *fresh) if one.held.keys() - {-1}][-MOST_SPENT:]
    passes.vectors[number], passes.remade = now, False
    passes.thrown, passes.changed = [], {}
    return event


def _checkpoint(own: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if state.observing or not torch.is_grad_enabled():
            return own(function, *args, **kwargs)
        kept = kwargs.get("preserve_rng_state", True)
        before = None if kept else torch.get_rng_state()
        out = own(function, *args, **kwargs)
        note_checkpoint(function, out, before, user_line())
        return out

    return checkpoint


@quietly
def note_checkpoint(function: Any, out: Any, before: torch.Tensor | None, at: str) -> None:
    """Log a line that checkpoints activations: whether its weights lose their gradients, or it draws other numbers."""
    outputs = [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, torch.Tensor)]
    trainable = any(p.requires_grad for module in _modules_in(function) for p in module.parameters())
    lost = trainable and bool(outputs) and not any(t.requires_grad for t in outputs)
    drew = before is not None and not torch.equal(before, torch.get_rng_state())
    if (at, lost or drew) not in passes.checkpoints:
        passes.checkpoints.add((at, lost or drew))
        note("checkpoint", at=at, lost=lost, redrawn=drew)


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function calls, as far as can be seen: itself, its object, or those it closes over."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        yield from _modules_in(function.func)
    elif isinstance(getattr(function, "__self__", None), nn.Module):
        yield function.__self__
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, nn.Module):
            yield cell.cell_contents
