"""What a Function of the script's, whose forward gathers from all ranks, does with the gradient of what it gathered."""
# ruff: noqa: ANN401  (it passes on what backward passes get)

from typing import Any

import torch
import torch.distributed as dist

from ..trail import note
from .common import quietly

MOST_NOTED = 12


class Returned:
    """The exchanges between ranks that were begun, and the Functions that were followed."""

    exchanges = 0
    noted = 0


def follow(function: Any, at: str, group: Any) -> None:
    """Log, when the backward pass of this Function has ended, the gradient that came, and whether it was exchanged.

    Args:
        function: the context of a torch.autograd.Function in its forward.
        at: the line that gathers.
        group: the process group; None for all ranks.
    """
    if Returned.noted >= MOST_NOTED or not any(getattr(function, "needs_input_grad", ())):
        return
    Returned.noted += 1
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    before = 0

    def begins(_: tuple) -> None:
        nonlocal before
        before = Returned.exchanges

    @quietly
    def ends(_: tuple, gradients: tuple) -> None:
        came = [one for one in gradients if isinstance(one, torch.Tensor) and one.is_floating_point()]
        sums = [[float(one.double().sum()), float(one.double().abs().sum())] for one in came]
        note("gathered_back", at=at, ranks=ranks, exchanges=Returned.exchanges - before, came=sums)

    function.register_prehook(begins)
    function.register_hook(ends)
