"""What a rank does, noted where any script has to pass.

That is at the outermost call of a model, at an optimizer's step, at a collective, at a backward pass of
DistributedDataParallel. Nothing here reads the script.
"""

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from clinic import coded

GRADIENTS = 10
"""number of updates whose gradients are noted: a model has a million weights"""


@dataclass
class Shown:
    """One call of the model, from outside."""

    training: bool
    """the mode of the model"""
    samples: list[int]
    """the numbers of the samples (see `clinic.coded`), if it was shown coded digits"""
    children: frozenset[int]
    """processes that worked for this one at the time, such as loader workers"""
    updates: int
    """updates before it"""
    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None


@dataclass
class Update:
    """One step of the optimizer."""

    lr: float
    gradient: torch.Tensor | None
    """of all weights, (weights,), as the optimizer was given it; noted for the first `GRADIENTS` updates"""
    reductions: int
    """all-reduces of gradients since the update before"""


@dataclass
class Rank:
    """What one rank did."""

    shown: list[Shown] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    """those that the script itself called: name and line"""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """of the model, at the end"""
    extra: Any = None
    """what a grader's own `watch` returned"""
    status: int | None = None
    complete: bool = True
    """it came to its end and left its notes"""
    output: str = ""
    stuck: str = ""
    """where in the script it was when it was ended for taking too long"""

    @property
    def trained(self) -> list[int]:
        """The samples it trained on, in order."""
        return [sample for call in self.shown if call.training for sample in call.samples]

    @property
    def validated(self) -> list[int]:
        """The samples it validated on, in order."""
        return [sample for call in self.shown if not call.training for sample in call.samples]


class Calls(threading.local):
    """The calls of modules that have begun in this thread: another thread may load data with modules of its own."""

    depth = 0
    """number of calls that have not ended; those within another one are not noted"""
    shown: Shown | None = None
    """the note of the outermost call, if it is a call of the model"""


def take_notes(rank: Rank, script: Path, keep: bool, stop_after: int | None) -> Callable[[], None]:
    """Have ``rank`` filled from now on; what is returned adds the weights at the end."""
    calls = Calls()
    reductions = [0]
    model: list[nn.Module] = []
    hooked: set[int] = set()

    def before_forward(module: nn.Module, arguments: tuple) -> None:
        calls.depth += 1
        if calls.depth > 1 or not _is_model(module):
            return
        if not arguments or not isinstance(arguments[0], torch.Tensor) or arguments[0].is_meta:
            return
        inputs = arguments[0].detach()
        is_digit = inputs.dim() == 4 and inputs.shape[1:] == (1, 28, 28)
        ddp = isinstance(module, DistributedDataParallel)
        if ddp and id(module) not in hooked and torch.is_grad_enabled():
            module.register_comm_hook(None, _all_reduce)
        children = frozenset(child.pid for child in multiprocessing.active_children() if child.pid)
        samples = coded.numbers_of(inputs).tolist() if is_digit else []
        calls.shown = Shown(module.training, samples, children, len(rank.updates))
        rank.shown.append(calls.shown)
        if keep:
            calls.shown.inputs = inputs.clone()
        if module.training:
            model[:] = [module]

    def after_forward(module: nn.Module, arguments: tuple, outputs: object) -> None:
        calls.depth -= 1
        if calls.depth > 0:
            return
        shown, calls.shown = calls.shown, None
        if shown and keep and isinstance(outputs, torch.Tensor):
            shown.outputs = outputs.detach().clone()

    register_module_forward_pre_hook(before_forward)
    register_module_forward_hook(after_forward, always_call=True)

    own_register = DistributedDataParallel.register_comm_hook

    def register_comm_hook(ddp: DistributedDataParallel, state: object, hook: Callable) -> None:
        hooked.add(id(ddp))

        def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            reductions[0] += 1
            return hook(state, bucket)

        counted.__annotations__ = {}
        own_register(ddp, state, counted)

    DistributedDataParallel.register_comm_hook = register_comm_hook

    def before_update(optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradient = None
        if len(rank.updates) < GRADIENTS:
            parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
            gradient = torch.cat([part.detach().flatten() for part in parts])
        rank.updates.append(Update(float(optimizer.param_groups[0]["lr"]), gradient, reductions[0]))
        reductions[0] = 0
        if len(rank.updates) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    before_each_update(before_update)

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "barrier", "gather"):
        _note_calls(name, rank.collectives, script)

    def finish() -> None:
        if model:
            module = getattr(model[0], "module", model[0])
            rank.weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    return finish


class GraphCounter:
    """Counts the training steps whose autograd graphs are in memory, from the calls of the digits' stand-in model."""

    def __init__(self) -> None:
        self.most_kept = 0
        """the largest number of graphs that were in memory at once, also of steps whose backward pass is over"""
        self.most_pending = 0
        """the largest number of those whose backward pass had not begun: they hold all activations of their step"""
        self._kept: weakref.WeakSet = weakref.WeakSet()
        self._pending: weakref.WeakSet = weakref.WeakSet()
        register_module_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, _: tuple, outputs: torch.Tensor) -> torch.Tensor:
        if not isinstance(module, coded.SmallReader) or not outputs.requires_grad:
            return outputs
        outputs = _GraphNode.apply(outputs, self._kept, self._pending)
        self.most_kept = max(self.most_kept, len(self._kept))
        self.most_pending = max(self.most_pending, len(self._pending))
        return outputs


class _GraphNode(torch.autograd.Function):
    """Changes nothing, but its context is in memory for as long as the graph that it is a node of."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, kept: weakref.WeakSet, pending: weakref.WeakSet) -> torch.Tensor:  # noqa: ANN401
        kept.add(ctx)
        pending.add(ctx)
        ctx.pending = pending
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        ctx.pending.discard(ctx)
        return gradient, None, None


def before_each_update(note: Callable[[Optimizer], None]) -> None:
    """Call ``note`` with the optimizer before each of its updates, after all hooks that the script has registered.

    PyTorch calls the global hooks first. A hook of the script's own may still change the gradients, for example clip
    them. Therefore the global hook here only puts another hook at the end of those of the optimizer.
    """
    handles: dict[int, RemovableHandle] = {}

    def before_own_hooks(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in handles:
            handles[id(optimizer)].remove()
        handles[id(optimizer)] = optimizer.register_step_pre_hook(after_own_hooks)

    def after_own_hooks(optimizer: Optimizer, *_: object) -> None:
        note(optimizer)

    register_optimizer_step_pre_hook(before_own_hooks)


def _is_model(module: nn.Module) -> bool:
    """Whether it has weights: the transforms of a data set are modules too."""
    return next(module.parameters(), None) is not None


def _all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)


def _note_calls(name: str, calls: list[str], script: Path) -> None:
    """Note every call of a collective that the script makes itself, before it is made."""
    own = getattr(dist, name)

    def noted(*arguments: object, **keywords: object) -> object:
        caller = sys._getframe(1)
        if caller.f_code.co_filename == str(script):
            calls.append(f"{name} in line {caller.f_lineno}")
        return own(*arguments, **keywords)

    setattr(dist, name, noted)
