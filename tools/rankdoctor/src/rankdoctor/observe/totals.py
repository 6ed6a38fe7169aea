"""Sums over the ranks: totals that are added up again, losses that are divided by one, norms of one rank's part."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..trail import note, user_line
from .common import local, optimizers, patch, quietly, state

MOST_VALUES = 64
"""numbers in a tensor that is looked at"""
MOST_NODES = 12
"""operations between what is minimized and the sum that it is made of"""
SMALLEST = 16
"""a number that a loss is divided by: a smaller one could be the number of ranks, or of batches that are accumulated"""
MOST_LOSSES = 200


@dataclass
class Totals:
    """The sums over the ranks that the script has made."""

    last: dict[int, tuple[Any, list[float]]] = field(default_factory=dict)
    """by the ids of tensors that were added up in place: the tensor, and what was in it afterwards"""
    recent: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=64))
    """sums, what this rank has put into them, and their lines"""
    losses: int = 0
    norms: dict[str, int] = field(default_factory=dict)
    """lines that take norms of this rank's part of a weight, in the present update: how many"""
    exchanged: bool = False
    """whether the present update has called a collective"""


totals = Totals()


def install() -> None:
    """Observe backward passes and norms."""
    patch(torch.autograd, "backward", _backward)
    patch(torch, "norm", _norm, torch.functional)
    for name in ("norm", "vector_norm"):
        patch(torch.linalg, name, _norm)
    patch(torch.Tensor, "norm", _norm)


@quietly
def before(tensor: torch.Tensor) -> list[float] | None:
    """Return what a tensor holds before it is added up over the ranks, if it has few numbers."""
    if tensor.numel() > MOST_VALUES or tensor.is_meta or tensor.is_sparse:
        return None
    return local(tensor).double().flatten().tolist()


@quietly
def after(tensor: torch.Tensor, own: list[float] | None, ranks: int, gradient: bool) -> None:
    """Remember a sum over the ranks; log whether the tensor had the sum of before in it when it was added up again."""
    if own is None:
        return
    now, at = local(tensor).double().flatten().tolist(), user_line()
    totals.recent.extend((total, part, at) for total, part in zip(now, own, strict=True))
    if gradient or tensor.requires_grad or ranks < 2:
        return
    kept = totals.last.get(id(tensor))
    if kept and kept[0]() is tensor and len(kept[1]) == len(own):
        grown = [new - old for new, old in zip(own, kept[1], strict=True)]
        again = min(kept[1]) >= 0 and max(kept[1]) > 0 and min(grown) >= 0
        note("total", at=at, again=again, before=max(kept[1]))
    totals.last[id(tensor)] = weakref.ref(tensor), now


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not state.in_backward and totals.recent and totals.losses < MOST_LOSSES:
            note_divisor(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        own(tensors, *args, **kwargs)

    return backward


@quietly
def note_divisor(loss: torch.Tensor, at: str) -> None:
    """Log that a loss is divided by a sum over the ranks, and by which other numbers it is multiplied."""
    nodes: list[tuple[Any, float, Any]] = [(loss.grad_fn, 1.0, None)]
    found: tuple[Any, float] | None = None
    for _ in range(MOST_NODES):
        if not nodes or found:
            break
        node, times, total = nodes.pop()
        factor, kind = number_in(node), type(node).__name__
        if kind == "DivBackward0" and factor:
            divisor = next((t for t in totals.recent if t[0] >= SMALLEST and _equal(t[0], factor)), None)
            total, times = divisor or total, times if divisor else times / factor
        elif kind == "MulBackward0" and factor:
            times *= factor
        elif kind not in PASSED_ON:  # what is divided begins here
            found = (total, times) if total else None
            continue
        nodes += [(following, times, total) for following, _ in node.next_functions if following is not None]
    if found:
        (total, part, summed_at), times = found
        scale = optimizers.scaler.get_scale() if optimizers.scaled else 1.0
        totals.losses += 1
        note("divisor", at=at, total=total, own=part, summed_at=summed_at, times=times / scale)


PASSED_ON = ("AddBackward0", "SumBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0")
"""operations that give each part of a sum the gradient of the sum"""


def number_in(node: Any) -> float:
    """Return the number by which an operation multiplies or divides; 0 if it is no single number."""
    for name in ("_saved_other", "_saved_self"):
        saved = getattr(node, name, None)
        if isinstance(saved, torch.Tensor) and saved.numel() == 1:
            return float(local(saved))
        if isinstance(saved, int | float):
            return float(saved)
    return 0.0


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _norm(own: Callable[..., Any]) -> Callable[..., Any]:
    def norm(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        if optimizers.depth and not state.observing and isinstance(out, torch.Tensor) and out.dim() == 0:
            note_norm(args[0] if args else next(iter(kwargs.values())), user_line())
        return out

    return norm


@quietly
def note_norm(tensor: Any, at: str) -> None:
    """Remember the norm of what has the shape of this rank's part of a weight, and not of the whole weight."""
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "to_local") and tensor.shape in _parts():
        totals.norms[at] = totals.norms.get(at, 0) + 1


def _parts() -> set[torch.Size]:
    found = [one for known in optimizers.known.values() if (one := known())]
    weights = [p for one in found for group in one.param_groups for p in group["params"] if hasattr(p, "to_local")]
    whole = {p.shape for p in weights}
    return {shape for p in weights if (shape := p.to_local().shape) != p.shape} - whole


def at_end_of_step(world: int) -> None:
    """Log the norms of parts of this update, unless it has exchanged something: then they may be of all parts."""
    if totals.norms and not totals.exchanged and world > 1:
        at = max(totals.norms, key=lambda line: totals.norms[line])
        note("part_norm", at=at, count=sum(totals.norms.values()))
    totals.norms, totals.exchanged = {}, False


def world_of(kwargs: dict[str, Any], args: tuple) -> int:
    """Return the number of ranks that take part in a collective."""
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    return dist.get_world_size(group) if dist.is_initialized() else 1
