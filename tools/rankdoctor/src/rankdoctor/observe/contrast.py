"""Contrastive losses over gathered features: is the target of each sample the column of its pair?"""
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
"""of the graph of a loss"""
LARGEST = 4_000_000
"""values of a matrix that is searched"""
sent: deque[torch.Tensor] = deque(maxlen=8)
"""what this rank has given to the last gathers"""
looked_at: list[str] = []


def install() -> None:
    """Observe what is gathered, and the targets of cross-entropies."""
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


def places_of(matrix: torch.Tensor, rows: int) -> Iterator[int]:
    """Yield the rows of a matrix at which the features begin that this rank has sent."""
    for one in sent:
        if len(one) == rows and one.shape[1] == matrix.shape[1]:
            for place in range(0, len(matrix) - rows + 1, rows):
                if torch.allclose(matrix[place : place + rows], one.to(matrix.device), atol=1e-3):
                    yield place
