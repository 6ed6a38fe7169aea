"""When updates of weights end, and when a loop waits for its loader."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch.utils.data.dataloader as dataloader
from torch.cuda import CUDAGraph
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import graphs


def call_after_updates(ended: Callable[[], None]) -> None:
    """Call ``ended`` after each update, and after each replay of a graph that has recorded one."""
    capturing: list[CUDAGraph] = []
    with_update: WeakSet[CUDAGraph] = WeakSet()

    def updated(*_: Any) -> None:  # noqa: ANN401
        if capturing:
            with_update.add(capturing[-1])
        else:
            ended()

    def replayed(graph: CUDAGraph) -> None:
        if graph in with_update:
            ended()

    graphs.follow(captures=capturing.append, captured=lambda graph: capturing.clear(), replayed=replayed)
    register_optimizer_step_post_hook(updated)


def time_the_loaders(clock: Callable[[], float], note: Callable[[float, float], None]) -> None:
    """Call ``note`` with the times, by this clock, between which a loop has waited for a batch of a DataLoader."""
    own = dataloader._BaseDataLoaderIter.__next__

    def timed(self: Any) -> Any:  # noqa: ANN401
        began = clock()
        try:
            return own(self)
        finally:
            note(began, clock())

    dataloader._BaseDataLoaderIter.__next__ = timed
