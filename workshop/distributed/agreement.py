"""Ranks agreeing with each other, in CPU memory, whatever their gradients travel by."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from workshop.distributed.ranks import Ranks
from workshop.errors import UserError

T = TypeVar("T")


class Agreement:
    """What all ranks must see alike; a single process agrees with itself.

    Every method is a collective: all ranks call it, in the same order. It has a group of its own, over gloo, so it
    never waits for a GPU.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        try:
            self.group = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            name = f"the name of each node, here {os.uname().nodename}, must lead to an address that the others reach"
            advice = f"{name}; or export GLOO_SOCKET_IFNAME, the network interface to use"
            raise UserError(f"the ranks cannot talk over gloo: {reason}; {advice}") from None

    def minimum(self, values: list[float]) -> list[float]:
        """Return, for each of the values, the smallest that any rank has.

        This is an all-gather, so that a trace of a training step contains no all-reduces but those of gradients.
        """
        if self.group is None:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).amin(dim=0).tolist()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on the main one; on others an empty list."""
        if self.group is None:
            return [value]
        values = [value] * self.ranks.world_size if self.ranks.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def on_main(self, work: Callable[[], T]) -> T:
        """Have the main rank do ``work``; return its result, or raise `UserError` for its error, on all ranks."""
        answer: list = [None, None]
        if self.ranks.is_main:
            try:
                answer[0] = work()
            except (OSError, UserError) as error:
                answer[1] = str(error)
        if self.group is not None:
            dist.broadcast_object_list(answer, group=self.group)
        result, mistake = answer
        if mistake is not None:
            raise UserError(mistake)
        return result

    def on_each(self, work: Callable[[], T]) -> T:
        """Have every rank do ``work``; return its own result, or raise `UserError` on all ranks if any of them fails.

        The message is that of the first rank that failed, the same on all ranks.
        """
        result, mistake = None, None
        try:
            result = work()
        except (OSError, UserError) as error:
            mistake = str(error)
        mistakes = [mistake] * self.ranks.world_size
        if self.group is not None:
            dist.all_gather_object(mistakes, mistake, group=self.group)
        for found in mistakes:
            if found is not None:
                raise UserError(found)
        return result


def slowest(seconds: float, device: torch.device) -> float:
    """Return the longest of all ranks' times, on all ranks; without a process group, return ``seconds``."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def backend_in_use(device: torch.device) -> dict[str, str | None]:
    """Return the name and the class of the backend that carries the gradients of ``device``, for summary.json.

    The class is noted because one name, "nccl", stands for different classes in different versions of torch. Without
    a process group both are None.
    """
    if not dist.is_initialized():
        return {"backend": None, "backend_class": None}
    backend = dist.group.WORLD._get_backend(device)
    return {"backend": dist.get_backend(), "backend_class": type(backend).__name__}
