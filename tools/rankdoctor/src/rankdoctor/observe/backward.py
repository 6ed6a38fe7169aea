"""Losses and backward passes, and the gradients they leave."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ..trail import note, trail, user_line
from . import branches
from .common import (
    in_transform,
    local,
    optimizers,
    quietly,
    state,
)
from .models import Alive, models
from .totals import MOST_NODES, PASSED_ON, number_in


def wrap_loss(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a loss of torch be followed through the backward pass."""

    def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = own(input, target, *args, **kwargs)
        is_new = "_rankdoctor_followed" not in out.__dict__  # the stand-in's mode lets torch call this function again
        if state.training and not state.observing and out.requires_grad and is_new and not in_transform():
            out.__dict__["_rankdoctor_followed"] = True
            named = (
                dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False))
                | kwargs
            )
            _follow(out, target, named)
        return out

    return loss


@quietly
def _follow(out: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> None:
    """Log in backward with which factor each sample of this loss counts in what is minimized."""
    if target.dtype != torch.int64:
        return
    kept = target[target != options.get("ignore_index", -100)]
    weight = options.get("weight")
    count = 1.0
    if out.dim():  # reduction="none": the script adds them up itself
        place, call = trail.user_call()
        out.register_hook(lambda gradient: note_factor(place, call, gradient))
        return
    if options.get("reduction", "mean") == "mean":
        count = (float(weight[kept].sum()) if weight is not None else float(kept.numel())) or 1.0
    (at, call), samples = trail.user_call(), int(kept.numel())
    out.register_hook(lambda factor: models.factors.append((at, samples, float(factor.detach()) / count, call)))


@quietly
def note_factor(at: str, call: int, gradient: torch.Tensor) -> None:
    """Remember how much each sample counts, if all that count do so alike."""
    counted = gradient[gradient != 0].abs()
    if counted.numel() and float(counted.max()) <= 1.01 * float(counted.min()):
        models.factors.append((at, int(counted.numel()), float(counted.mean()), call))


MEAN, SUM = 1, 2
"""what a loss of torch remembers of its reduction"""
MEANS = {
    "MeanBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
}
"""operations that can take a mean over all elements"""


@quietly
def note_elements(loss: torch.Tensor, at: str) -> None:
    """Remember how much an element counts in each sum or mean that is minimized, such as one over a mask."""
    nodes: list[tuple[Any, float, bool]] = [(loss.grad_fn, 1.0, False)]  # with a factor, and whether a sum was passed
    found = []
    for _ in range(MOST_NODES):
        if not nodes:
            break
        node, times, is_summed = nodes.pop()
        kind, factor = type(node).__name__, number_in(node)
        following = [one for one, _ in node.next_functions if one is not None]
        if kind in MEANS and (count := _elements_of_mean(node)):
            found.append((count, abs(times) / count))
        elif kind in MEANS and getattr(node, "_saved_reduction", 0) == SUM:
            found.append((int(node._saved_self.numel()), abs(times)))
        elif kind in ("DivBackward0", "MulBackward0") and factor and len(following) == 1:
            nodes.append((following[0], times / factor if kind == "DivBackward0" else times * factor, is_summed))
        elif kind in PASSED_ON:
            nodes += [(one, times, is_summed or kind == "SumBackward0") for one in following]
        elif is_summed:
            found.append((0, abs(times)))
    models.elements += [(at, term, count, weight) for term, (count, weight) in enumerate(found)]


@quietly
def note_spread(loss: torch.Tensor, at: str) -> None:
    """Log that each output meets each target: (N, 1) minus (N) is (N, N), of N samples.

    What the model itself compares in pairs depends on its outputs twice, and so do features that are divided by their
    norm, (N, N) by (N, 1) if there are as many features as samples.
    """
    nodes = [(loss.grad_fn, False)]  # with whether it is one of several operands that depend on the outputs
    for _ in range(MOST_NODES):
        if not nodes:
            break
        node, beside_others = nodes.pop(0)
        following = [(one, number) for one, number in node.next_functions if one is not None]
        nodes += [(one, len(following) > 1) for one, _ in following]
        if len(following) != 1 or beside_others or not node._input_metadata:
            continue
        one, number = following[0]
        whole, part = tuple(node._input_metadata[0].shape), tuple(one._input_metadata[number].shape)
        size = whole[0] if whole else 0
        if size > 2 and size in models.lengths and whole == (size, size) and part in ((size, 1), (size,)):
            note("spread", at=at, shape=list(part), became=list(whole))
            return


def _elements_of_mean(node: Any) -> int:
    """Return of how many elements an operation takes the mean; 0 if it takes none."""
    if hasattr(node, "_saved_self_sym_numel"):
        return int(node._saved_self_sym_numel)
    is_mean = getattr(node, "_saved_reduction", 0) == MEAN
    return int(node._saved_self.numel()) if is_mean else 0


def wrap_backward(own: Callable[..., None]) -> Callable[..., None]:
    """Note each backward pass, and what it does to the gradients."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if state.in_backward:  # reentrant checkpointing calls it within a backward pass
            return own(tensors, *args, **kwargs)
        branches.look()
        note_elements(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        note_spread(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        note_backward(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        before = gradient_sizes() or {}
        state.in_backward = True
        try:
            own(tensors, *args, **kwargs)
        finally:
            state.in_backward = False
        return note_gradients(before)

    return backward


@quietly
def note_backward(loss: torch.Tensor, at: str) -> None:
    """Remember a backward pass, and whether its graph stays in memory."""
    models.backwards.append(at)
    models.losses.append(float(local(loss)) if loss.numel() == 1 else 0.0)
    models.of_terms.append(is_sum_of_terms(loss))
    token, node = Alive(), loss.grad_fn
    models.graphs.append((weakref.ref(token), at))
    for _ in range(3):  # the script may keep the loss, but not what it made of it for this call, such as a scaled loss
        if node is None or type(node).__name__ == "AccumulateGrad":  # which lives as long as the weight
            break
        node.metadata["rankdoctor"] = token
        node = node.next_functions[0][0] if node.next_functions else None


def is_sum_of_terms(loss: torch.Tensor) -> bool:
    """Return whether several losses are added up in what is minimized, below factors of the whole."""
    node = loss.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"):
        inner = [one for one, _ in node.next_functions if one is not None]
        if len(inner) != 1:
            break
        node = inner[0]
    return type(node).__name__ in ("AddBackward0", "SubBackward0", "StackBackward0", "SumBackward0")


def sizes_now() -> dict[int, float]:
    """Return the size of the gradients of each optimizer."""
    return {number: gradient_size(one) for number, known in optimizers.known.items() if (one := known())}


gradient_sizes = quietly(sizes_now)


def gradient_norm(optimizer: Optimizer) -> float:
    """Return the norm of the same gradients as `gradient_size`."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return sum(float(local(p.grad).double().square().sum()) for p in itertools.islice(parameters, 5)) ** 0.5


def gradient_size(optimizer: Optimizer) -> float:
    """Return the sum of the absolute values of the first five gradients, of the parts that this rank has."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return sum(float(local(p.grad).double().abs().sum()) for p in itertools.islice(parameters, 5))


@quietly
def note_gradients(before: dict[int, float]) -> None:
    """Remember which gradients were zero before a backward pass, to which old ones it has added, and their sizes."""
    models.sizes = sizes_now()
    models.norms = {number: gradient_norm(one) for number, known in optimizers.known.items() if (one := known())}
    if sum(optimizers.updates.values()) < 3:
        for p in (p for model in models.known for p in model.parameters()):
            if hasattr(p, "device_mesh") and p.requires_grad and p.grad is not None:
                models.sharded[id(p)] = p
    for number, size in before.items():
        if size == 0:
            models.zeroed.add(number)
        elif models.sizes.get(number) != size:
            models.added.add(number)
