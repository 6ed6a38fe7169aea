"""What ranks exchange besides gradients: decisions that all of them must take alike."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workshop.errors import UserError

T = TypeVar("T")


class ControlGroup:
    """A process group of its own over gloo, in CPU memory, so that it never waits for a GPU.

    Every method is a collective: all ranks must call it, in the same order. With one rank there is no group, and every
    method returns at once.

    Raises:
        UserError: the ranks cannot connect to each other.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        try:
            self.group = dist.new_group(backend="gloo") if world_size > 1 else None
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            name = f"the name of each node, here {os.uname().nodename}, must lead to an address that the others reach"
            advice = f"{name}; or export GLOO_SOCKET_IFNAME, the network interface to use"
            raise UserError(f"the ranks cannot connect over gloo: {reason}; {advice}") from None

    def minimum(self, values: list[float]) -> list[float]:
        """Return, for each of the values, the smallest that any rank has.

        This is an all-gather, so that the only all-reduces in a trace of a training step are those of gradients.
        """
        if self.group is None:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        of_all = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(of_all, mine, group=self.group)
        return torch.stack(of_all).amin(dim=0).tolist()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on rank 0; on the others an empty list."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Have rank 0 do ``work``; return its result, or raise `UserError` with its error, on all ranks."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
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
        """Have every rank do ``work``; return its own result, or raise `UserError` on all ranks if it fails on any.

        The message is that of the first rank that failed, the same on all ranks.
        """
        result: Any = None
        mistakes: list[str | None] = [None]
        try:
            result = work()
        except (OSError, UserError) as error:
            mistakes = [str(error)]
        if self.group is not None:
            mine = mistakes[0]
            mistakes = [None] * self.world_size
            dist.all_gather_object(mistakes, mine, group=self.group)
        for mistake in mistakes:
            if mistake is not None:
                raise UserError(mistake)
        return result


def backend_in_use(device: torch.device) -> dict[str, str | None]:
    """Return the name and the class of the backend that carries the gradients of ``device``, for summary.json.

    The class is included because one name, "nccl", stands for different classes in different versions of torch.
    Without a process group both are None.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return {"backend": None, "backend_class": None}
    return {"backend": dist.get_backend(), "backend_class": type(group._get_backend(device)).__name__}
