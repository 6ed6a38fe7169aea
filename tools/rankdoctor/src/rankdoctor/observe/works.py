"""Collectives that the script starts and does not wait for, before an optimizer uses the gradients that they add up."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..trail import note, user_line
from .common import address, optimizers, patch, quietly

MOST_NOTED = 20


class Works:
    """What was started: the handle, the tensor, and the line."""

    begun: list[tuple[Any, torch.Tensor, str]] = []  # noqa: RUF012  (one for the process, as the class is)
    noted = 0


def install() -> None:
    """Observe what is done with the handles of collectives."""
    if not dist.is_available():
        return
    for name in ("wait", "synchronize", "get_future", "block_current_stream", "result"):
        if hasattr(dist.Work, name):
            patch(dist.Work, name, _waits)
    patch(torch.cuda, "synchronize", _waits_for_all)
    register_optimizer_step_pre_hook(_before_step)


def begin(work: Any, tensor: torch.Tensor) -> None:
    """Remember a collective that returns before its tensor has the result."""
    if isinstance(work, dist.Work) and Works.noted < MOST_NOTED:
        Works.begun.append((work, tensor, user_line()))


def _waits(own: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        Works.begun = [one for one in Works.begun if one[0] is not work]
        return own(work, *args, **kwargs)

    return wait


def _waits_for_all(own: Callable[..., Any]) -> Callable[..., Any]:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        Works.begun = []
        return own(*args, **kwargs)

    return synchronize


@quietly
def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Log how many of the gradients that this optimizer is about to use are still being added up."""
    if optimizers.depth > 1 or not Works.begun:
        return
    gradients = {address(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    used = [at for _, tensor, at in Works.begun if address(tensor) in gradients - {0}]
    if used:
        Works.noted += 1
        note("unwaited", at=used[0], count=len(used), values=len(gradients))
    Works.begun = []
