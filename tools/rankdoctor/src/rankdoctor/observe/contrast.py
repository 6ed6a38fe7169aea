"""Contrastive losses over gathered features: are targets, and what a mask leaves out, in the columns of this rank?"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..trail import note, user_line
from .common import local, patch, quietly, state

MOST = 40
"""losses that are looked at"""
NODES = 12
"""of the graph of scores"""
NODES_OF_LOSS = 80
"""of the graph of what is minimized"""
LEFT_OUT = -1e4
"""a score that no exponential function is sensitive to"""
EQUAL = 0.999
"""cosine of the angle between features that count as equal"""
LARGEST = 4_000_000
"""values of a matrix that is searched"""
sent: deque[torch.Tensor] = deque(maxlen=8)
"""what this rank has given to the last gathers"""
looked_at: list[str] = []
masked: list[str] = []


def install() -> None:
    """Observe what is gathered, the targets of cross-entropies, and the masks in what is minimized."""
    if not dist.is_available():
        return
    for name in ("all_gather", "all_gather_into_tensor"):
        patch(dist, name, _gathering(1), dist.distributed_c10d)
    functional = importlib.import_module("torch.distributed._functional_collectives")
    for name in ("all_gather_tensor", "all_gather_tensor_autograd", "all_gather_single", "all_gather_single_autograd"):
        if hasattr(functional, name):
            patch(functional, name, _gathering(0))
    patch(importlib.import_module("torch.distributed.nn.functional"), "all_gather", _gathering(0))
    patch(nn.functional, "cross_entropy", _cross_entropy)
    patch(torch.autograd, "backward", _backward)


def _gathering(place: int) -> Callable[[Callable], Callable]:
    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            tensors = [one for one in (*args[place : place + 1], *kwargs.values()) if isinstance(one, torch.Tensor)]
            if tensors and not state.observing:
                remember(tensors[-1])
            return own(*args, **kwargs)

        return gather

    return wrap


@quietly
def remember(tensor: torch.Tensor) -> None:
    """Keep a copy of the features that a rank sends, (N, D)."""
    part = local(tensor.detach())
    if part.dim() == 2 and part.is_floating_point() and len(part) > 1 and part.numel() <= LARGEST:
        sent.append(F.normalize(part.float(), dim=1))


def _cross_entropy(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if sent and not state.observing and len(looked_at) < MOST:
            look_at(input, target)
        return own(input, target, *args, **kwargs)

    return loss


@quietly
def look_at(scores: torch.Tensor, target: torch.Tensor) -> None:
    """Log the column of the first target, and that of this rank's own first features, if the targets are in a row."""
    rows = len(target) if target.dim() == 1 and target.dtype == torch.int64 else 0
    if rows < 2 or scores.dim() != 2 or len(scores) != rows or scores.shape[1] <= rows or scores.grad_fn is None:
        return
    first = int(target[0])
    if not torch.equal(target, torch.arange(first, first + rows, device=target.device)):
        return
    found = {place for one in matrices(scores, scores.shape[1]) for place in places_of(one, rows)}
    if len(found) == 1:
        at = user_line()
        looked_at.append(at)
        note("contrast", at=at, target=first, own=found.pop(), columns=scores.shape[1])


def matrices(scores: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
    """Yield the features of all columns, (columns, D), that the scores were computed from."""
    nodes: list[Any] = [scores.grad_fn]
    seen: set[Any] = set()
    while nodes and len(seen) < NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in ("_saved_self", "_saved_mat2", "_saved_other"):
            saved = getattr(node, name, None)
            if isinstance(saved, torch.Tensor) and saved.numel() <= LARGEST:
                matrix = saved.detach().squeeze()
                if matrix.dim() == 2 and columns in matrix.shape:
                    yield F.normalize((matrix if matrix.shape[0] == columns else matrix.T).float(), dim=1)
        nodes += [following for following, _ in node.next_functions]


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if sent and not state.in_backward and len(masked) < MOST:
            look_at_masks(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        own(tensors, *args, **kwargs)

    return backward


@quietly
def look_at_masks(loss: torch.Tensor, at: str) -> None:
    """Log, for each mask of the loss that is about one column of each row, in how many rows it is an own column."""
    nodes, seen = [loss.grad_fn], set[Any]()
    masks, features = list[torch.Tensor](), list[tuple[Any, torch.Tensor]]()
    while nodes and len(seen) < NODES_OF_LOSS:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        masks += masks_of(node)
        columns = getattr(node, "_saved_mat2", None)
        if isinstance(columns, torch.Tensor) and columns.numel() <= LARGEST:
            features.append((getattr(node, "_saved_self", None), columns.detach().T))
        nodes += [following for following, _ in node.next_functions]
    for number, mask in enumerate(masks):
        own = next((found for one in features if (found := own_columns(mask, *one)) is not None), None)
        if own is not None and len(masked) < MOST:
            masked.append(at)
            right = int((mask & own).any(1).sum())
            note("contrast_mask", at=at, mask=number, count=len(mask), right=right, columns=mask.shape[1])


def masks_of(node: Any) -> Iterator[torch.Tensor]:
    """Yield masks (rows, columns) that are true for one column of each row, from what an operation has saved."""
    names = ("_saved_mask", "_saved_condition", "_saved_other", "_saved_self", "_saved_result", "_saved_indices")
    saved = [getattr(node, name, None) for name in names]
    indices = saved.pop()  # a tuple for an index by tensors, and one tensor for others, such as topk
    for one in (*saved, *(indices if isinstance(indices, tuple) else (indices,))):
        if not isinstance(one, torch.Tensor) or one.dim() != 2 or not 2 < one.shape[1] <= LARGEST / len(one):
            continue
        values = one.detach()
        if values.dtype != torch.bool:
            low = values <= LEFT_OUT  # of scores
            values = low if low.any() else values.bool() if bool(((values == 0) | (values == 1)).all()) else low
        counts = values.sum(1)
        if bool((counts == 1).all()):
            yield values
        elif bool((counts == values.shape[1] - 1).all()):
            yield ~values


def own_columns(mask: torch.Tensor, rows: Any, columns: torch.Tensor) -> torch.Tensor | None:
    """Return which columns of a mask have the features of the row; None if the mask is of something else.

    Args:
        mask: (N, M).
        rows: features of the rows, (N, D), if the product that made the scores has kept them.
        columns: features of the columns, (M, D).
    """
    if columns.dim() != 2 or len(columns) != mask.shape[1] or len(mask) >= len(columns):
        return None
    columns = F.normalize(columns.float(), dim=1)
    if isinstance(rows, torch.Tensor) and rows.shape == (len(mask), columns.shape[1]):
        own = F.normalize(rows.detach().float(), dim=1) @ columns.T > EQUAL
    else:
        own = torch.zeros_like(mask)
        for place in places_of(columns, len(mask)):
            own |= torch.eye(*mask.shape, dtype=torch.bool, device=mask.device).roll(place, 1)
    return own if bool(own.any(1).all()) else None


def places_of(matrix: torch.Tensor, rows: int) -> Iterator[int]:
    """Yield the rows of a matrix at which the features begin that this rank has sent."""
    for one in sent:
        if len(one) == rows and one.shape[1] == matrix.shape[1]:
            for place in range(0, len(matrix) - rows + 1, rows):
                if torch.allclose(matrix[place : place + rows], one.to(matrix.device), atol=1e-3):
                    yield place
