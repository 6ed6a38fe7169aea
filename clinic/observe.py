"""Record what a rank does, at points that every script has to pass; nothing here reads the script.

These points are the outermost call of a model, the step of an optimizer, and every operation that PyTorch dispatches.
`take_notes` begins, in the process of the rank, and `clinic.runs` returns the notes to a grader.
"""

import multiprocessing
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from clinic import coded

GRADIENTS = 16
"""number of updates whose gradients are noted"""
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "gather", "scatter", "reduce")


@dataclass
class Shown:
    """One call of the model, from outside."""

    training: bool
    """the mode of the model"""
    samples: list[int]
    """the numbers of the samples (see `clinic.coded`), if it was shown coded digits"""
    size: int
    """of the batch"""
    children: frozenset[int]
    """processes that worked for this one at the time, such as loader workers"""
    updates: int
    """updates before it"""
    random_state: int
    """hash of the state of PyTorch's default generator before the call"""
    weights: list[torch.Tensor] = field(default_factory=list)
    """before the call, in training; of sharded weights this rank's shards; only with ``keep``, as inputs and outputs"""
    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    unsharded: int = 0
    """number of elements in unsharded weights after the call"""


@dataclass
class Update:
    """One step of the optimizer."""

    lr: float
    gradients: list[torch.Tensor]
    """gradient of each weight, as the optimizer got it, zero where there is none; of sharded weights this rank's shard;
    recorded for the first `GRADIENTS` updates"""

    @property
    def gradient(self) -> torch.Tensor:
        """Of all weights, (weights,)."""
        return torch.cat([gradient.flatten() for gradient in self.gradients])


@dataclass
class Operation:
    """A collective or a matrix product (or convolution)."""

    name: str
    """one of `COLLECTIVES`, or "product" """
    numel: int
    """number of elements on one rank: the larger one of sent and received, or of the product"""
    dtype: torch.dtype
    updates: int
    """updates before it"""
    forward: bool
    """whether it is within a forward pass of the model"""


@dataclass
class Rank:
    """What one rank did."""

    shown: list[Shown] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    """noted with ``operations`` only"""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """of the model, at the end, and its buffers"""
    state_dtypes: set[torch.dtype] = field(default_factory=set)
    """of the averages that the optimizer keeps, at the end"""
    blocks: dict[str, int] = field(default_factory=dict)
    """numbers in the weights of each block that stands in an nn.ModuleList, all ranks together"""
    graphs: tuple[int, int] = 0, 0
    """with ``graphs``, the most training steps whose autograd graphs were in memory at once, and the most of those
    whose backward pass had not begun: these hold the activations of their step"""
    extra: Any = None
    """what a grader's own ``watch`` returned"""
    status: int | None = None
    """exit status; None if it was ended while it waited"""
    output: str = ""
    place: str = ""
    """where in the script it was when it was ended because it waited for ever, or when it crashed"""

    @property
    def training(self) -> list[Shown]:
        """The calls in training."""
        return [call for call in self.shown if call.training]

    @property
    def trained(self) -> list[int]:
        """The samples it trained on, in order."""
        return [sample for call in self.training for sample in call.samples]

    @property
    def validated(self) -> list[int]:
        """The samples it validated on, in order."""
        return [sample for call in self.shown if not call.training for sample in call.samples]


class Stop(BaseException):
    """Ends a rank between two steps, as a time limit would."""


def take_notes(
    rank: Rank, keep: bool = False, operations: bool = False, graphs: bool = False, stop_after: int | None = None
) -> Callable[[], None]:
    """Record into ``rank`` until this process ends; return a function that adds what is known only at the end.

    Args:
        keep: note inputs and outputs of the model, and its weights, at each call.
        operations: note collectives and matrix products.
        graphs: note how many autograd graphs are in memory; for `clinic.coded.SmallReader` only.
        stop_after: raise `Stop` when the model is called in training after this number of updates.
    """
    calls = _Calls()
    model: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    most_weights = 1

    def before_forward(module: nn.Module, arguments: tuple) -> None:
        nonlocal most_weights
        calls.depth += 1
        weights = list(module.parameters()) if calls.depth == 1 else []
        # Transforms of a data set are modules without weights; a block that is computed again has fewer than the model.
        if len(weights) < most_weights or not arguments or not isinstance(arguments[0], torch.Tensor):
            return
        inputs = arguments[0].detach()
        if inputs.is_meta:  # a trial of the model's shapes
            return
        if stop_after is not None and module.training and len(rank.updates) >= stop_after:
            raise Stop
        most_weights = len(weights)
        is_digit = inputs.dim() == 4 and inputs.shape[1:] == (1, 28, 28)
        calls.shown = Shown(
            module.training,
            coded.numbers_of(inputs).tolist() if is_digit else [],
            len(inputs),
            frozenset(child.pid for child in multiprocessing.active_children() if child.pid),
            len(rank.updates),
            hash(torch.get_rng_state().numpy().tobytes()),
        )
        rank.shown.append(calls.shown)
        if keep:
            calls.shown.inputs = inputs.clone()
            calls.shown.weights = [_copy(weight) for weight in weights] if module.training else []
        if module.training:
            model[:] = [module]

    def after_forward(_: nn.Module, __: tuple, outputs: object) -> None:
        calls.depth -= 1
        if calls.depth > 0:
            return
        shown, calls.shown = calls.shown, None
        if shown and keep and isinstance(outputs, torch.Tensor):
            shown.outputs = outputs.detach().clone()
        if shown and model:
            shown.unsharded = sum(w.numel() for w in model[0].parameters() if not isinstance(w, DTensor))

    def before_update(optimizer: Optimizer) -> None:
        weights = list(model[0].parameters()) if model and len(rank.updates) < GRADIENTS else []
        gradients = [_copy(torch.zeros_like(weight) if weight.grad is None else weight.grad) for weight in weights]
        rank.updates.append(Update(float(optimizer.param_groups[0]["lr"]), gradients))
        optimizers[:] = [optimizer]

    register_module_forward_pre_hook(before_forward)
    register_module_forward_hook(after_forward, always_call=True)
    before_each_update(before_update)
    counter = _GraphCounter() if graphs else None
    if operations:
        _Operations(rank, calls).__enter__()

    def finish() -> None:
        if model:
            for name, tensor in model[0].state_dict().items():
                rank.weights[name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")] = _copy(tensor)
            for parent, layers in model[0].named_modules():
                if isinstance(layers, nn.ModuleList):
                    blocks = layers.named_children()
                    rank.blocks |= {f"{parent}.{n}": sum(w.numel() for w in block.parameters()) for n, block in blocks}
        state = [value for optimizer in optimizers for values in optimizer.state.values() for value in values.values()]
        rank.state_dtypes = {value.dtype for value in state if isinstance(value, torch.Tensor) and value.dim()}
        if counter:
            rank.graphs = counter.most_kept, counter.most_pending

    return finish


def before_each_update(note: Callable[[Optimizer], None]) -> None:
    """Call ``note`` with the optimizer before each of its updates, after all hooks that the script has registered.

    PyTorch calls the global hooks first, but a hook of the script's own may still change the gradients, for example
    clip them. Therefore the global hook here only puts another hook at the end of those of the optimizer.
    """
    handles: dict[int, RemovableHandle] = {}

    def before_own_hooks(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in handles:
            handles[id(optimizer)].remove()
        handles[id(optimizer)] = optimizer.register_step_pre_hook(lambda optimizer, *_: note(optimizer))

    register_optimizer_step_pre_hook(before_own_hooks)


class _Calls(threading.local):
    """Module calls in progress in this thread: another thread may load data with other modules."""

    depth = 0
    """number of calls that have not ended; those within another one are not noted"""
    shown: Shown | None = None
    """the note of the outermost call, if it is a call of the model"""


class _Operations(TorchDispatchMode):
    """Intercepts every operation on plain tensors, also inside DDP and DTensor."""

    def __init__(self, rank: Rank, calls: _Calls) -> None:
        super().__init__()
        self.rank = rank
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: ANN401
        """Do the operation, and note it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then does it by operations on plain tensors, which come here
        result = func(*args, **(kwargs or {}))
        name = "product" if func.overloadpacket in flop_registry else ""
        if "c10d" in func.namespace:
            plain = func.overloadpacket.__name__.replace("_", "")
            name = next((kind for kind in COLLECTIVES if plain.startswith(kind)), "")
        if name:
            given = tree_leaves(result if name == "product" else (args, result))
            largest = max((leaf for leaf in given if isinstance(leaf, torch.Tensor)), key=torch.Tensor.numel)
            where = len(self.rank.updates), self.calls.shown is not None
            self.rank.operations.append(Operation(name, largest.numel(), largest.dtype, *where))
        return result


class _GraphCounter:
    """Counts the training steps whose autograd graphs are in memory."""

    def __init__(self) -> None:
        self.most_kept = self.most_pending = 0
        self._kept: weakref.WeakSet = weakref.WeakSet()
        self._pending: weakref.WeakSet = weakref.WeakSet()
        register_module_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, _: tuple, outputs: torch.Tensor) -> torch.Tensor:
        if isinstance(module, coded.SmallReader) and outputs.requires_grad:
            outputs = _GraphNode.apply(outputs, self._kept, self._pending)
            self.most_kept = max(self.most_kept, len(self._kept))
            self.most_pending = max(self.most_pending, len(self._pending))
        return outputs


class _GraphNode(torch.autograd.Function):
    """An identity, whose context lives as long as the autograd graph that contains it."""

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


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part of a tensor, which is all of it unless it is sharded."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
