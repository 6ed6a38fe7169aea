"""What a rank does whose model is sharded: what it gathers, keeps for backward, computes, and which weights it moves.

`note_steps` is for ``watch`` of `clinic.observe.Script.run`, together with ``notes=False``. It observes every operation
that PyTorch dispatches, and nothing of the script. Weights and gradients are this rank's parts of them.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import workshop.loaders.volumes
import workshop.models.vit  # noqa: F401  # these and FSDP are imported here, so that the ranks, which are forks, need not

NOTED = 8
"""number of steps whose weights and gradients are kept"""


@dataclass
class Sent:
    """One collective."""

    numel: int
    """numbers on one rank, of what is sent or of what is received, whichever are more"""
    dtype: torch.dtype


@dataclass
class Step:
    """From the first call of the model in training to the next one after an update."""

    forward_gathers: list[Sent] = field(default_factory=list)
    backward_gathers: list[Sent] = field(default_factory=list)
    reductions: list[Sent] = field(default_factory=list)
    gathered_at_once: int = 0
    """numbers of gathered weights that were in memory when the first backward pass began"""
    kept: int = 0
    """bytes computed in the first forward pass that are still in memory when its backward pass begins"""
    peak: int = 0
    """most bytes that forward and backward passes had computed and not yet freed, but for those of gathered weights"""
    flops: int = 0
    matrix_dtypes: set[torch.dtype] = field(default_factory=set)
    """formats in which matrix products were computed"""
    random_state: torch.Tensor | None = None
    """of this rank, when the step began"""
    lrs: list[float] = field(default_factory=list)
    """of each call of an optimizer's step"""
    losses: list[float] = field(default_factory=list)
    """where each backward pass began"""
    samples: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """of the model, before the first update"""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """of the model, at the first update; those that are None are left out"""
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    """the weights after the last update"""
    state_dtypes: set[torch.dtype] = field(default_factory=set)
    """of the optimizer's averages, after the last update"""

    @property
    def gathers(self) -> list[Sent]:
        """All of them."""
        return self.forward_gathers + self.backward_gathers


@dataclass
class Notes:
    """What one rank did."""

    steps: list[Step] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    """of each weight of the model, all ranks together"""
    blocks: dict[str, int] = field(default_factory=dict)
    """of each block that stands in an nn.ModuleList"""

    @property
    def weights(self) -> int:
        """How many numbers all weights have, all ranks together."""
        return sum(self.numbers.values())

    @property
    def largest_part(self) -> int:
        """Numbers of the largest block, or of all weights in no block if these are more."""
        rest = self.weights - sum(self.blocks.values())
        return max([rest, *self.blocks.values()])


class Observer(TorchDispatchMode):
    """Sees every operation on plain tensors: what DTensors do too, as the operations on their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.model: nn.Module = nn.Identity()  # until the script calls its own
        self.phase = ""
        """forward, backward, or none of them"""
        self.computed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """memory of what the first forward pass of a step computes"""
        self.in_memory: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """what this step has computed and not yet freed, with its bytes"""
        self.bytes_in_memory = 0

    @property
    def step(self) -> Step:
        """The current one."""
        return self.notes.steps[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: ANN401
        """Do the operation, and note it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then does it by operations on plain tensors, which come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.phase:
            self._note(func.overloadpacket, args, kwargs, result)
        return result

    def _note(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:  # noqa: ANN401
        step, name = self.step, operation.__name__.strip("_")
        if name.startswith(("allgather_base", "all_gather_into_tensor")):
            sent = step.forward_gathers if self.phase == "forward" else step.backward_gathers
            sent.append(_sent(args, result))
        elif name.startswith(("reduce_scatter_base", "reduce_scatter_tensor")):
            step.reductions.append(_sent(args, result))
        elif operation in flop_registry:
            step.flops += flop_registry[operation](*args, **kwargs, out_val=result)
            step.matrix_dtypes |= {tensor.dtype for tensor in _tensors(result)[:1]}
        for tensor in _tensors(result):
            if not tensor.is_meta and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                self._note_memory(storage)
                if self.phase == "forward" and not step.losses:
                    self.computed[storage.data_ptr()] = weakref.ref(storage)

    def _note_memory(self, storage: torch.UntypedStorage) -> None:
        """Add this memory to what the step has computed, until it is freed."""
        place, size = storage._cdata, storage.nbytes()
        if place in self.in_memory:
            return

        def freed(_: object) -> None:
            if place in self.in_memory:
                self.bytes_in_memory -= self.in_memory.pop(place)[1]

        self.in_memory[place] = weakref.ref(storage, freed), size
        self.bytes_in_memory += size
        self.step.peak = max(self.step.peak, self.bytes_in_memory)

    def before_forward(self, module: nn.Module, arguments: tuple) -> None:
        """Begin a step when the model itself is called in training."""
        if not arguments or not isinstance(arguments[0], torch.Tensor) or arguments[0].is_meta:
            return  # such as a trial of the model's shapes
        if isinstance(self.model, nn.Identity) and module.training and next(module.parameters(), None) is not None:
            self.model = module
            self._describe(module)
        if module is not self.model:
            return
        self.phase = ""
        if module.training and torch.is_grad_enabled():
            if not self.notes.steps or self.step.lrs:
                for memory in (self.computed, self.in_memory):
                    memory.clear()
                self.bytes_in_memory = 0
                self.notes.steps.append(Step(random_state=torch.get_rng_state(), weights=self._parts()))
            self.step.samples += len(arguments[0])
            self.phase = "forward"

    def before_backward(self, loss: torch.Tensor) -> None:
        """Note what is in memory, unless this is the backward pass of a later part of the step."""
        self.phase = ""
        if not self.notes.steps:
            return
        if not self.step.losses:
            gathered = [weight for weight in self.model.parameters() if not isinstance(weight, DTensor)]
            self.step.gathered_at_once = sum(weight.numel() for weight in gathered)
            weights = {local(weight).untyped_storage().data_ptr() for weight in self.model.parameters()}
            kept = {place: reference() for place, reference in self.computed.items() if place not in weights}
            self.step.kept = sum(storage.nbytes() for storage in kept.values() if storage is not None)
        self.step.losses.append(loss.detach().float().item())
        self.phase = "backward"

    def before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Note the gradients."""
        self.phase = ""
        if not self.notes.steps:
            return
        self.step.lrs.append(float(optimizer.param_groups[0]["lr"]))
        if len(self.step.lrs) == 1 and len(self.notes.steps) <= NOTED:
            named = _named(self.model)
            self.step.gradients = {
                name: _copy(weight.grad) for name, weight in named.items() if weight.grad is not None
            }

    def after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Note the weights."""
        if self.notes.steps and self.step.lrs:
            self.step.moved = self._parts()
            state = [value for values in optimizer.state.values() for value in values.values()]
            averages = [value for value in state if isinstance(value, torch.Tensor) and value.dim()]
            self.step.state_dtypes |= {value.dtype for value in averages}

    def _parts(self) -> dict[str, torch.Tensor]:
        if len(self.notes.steps) > NOTED:
            return {}
        return {name: _copy(weight) for name, weight in _named(self.model).items()}

    def _describe(self, model: nn.Module) -> None:
        self.notes.numbers = {name: weight.numel() for name, weight in _named(model).items()}
        for list_name, layers in model.named_modules():
            if isinstance(layers, nn.ModuleList):
                for name, block in layers.named_children():
                    self.notes.blocks[f"{list_name}.{name}"] = sum(weight.numel() for weight in block.parameters())


def note_steps(_: Path) -> Callable[[], Notes]:
    """For ``watch``: note the steps of this rank; `clinic.notes.Rank.extra` is then its `Notes`."""
    observer = Observer()
    own_backward = torch.autograd.backward

    def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401
        if observer.phase == "backward":  # activation checkpointing with use_reentrant=True: a backward pass within one
            own_backward(tensors, *arguments, **keywords)
            return
        observer.before_backward(tensors if isinstance(tensors, torch.Tensor) else tensors[0])
        own_backward(tensors, *arguments, **keywords)
        observer.phase = ""

    torch.autograd.backward = backward
    register_module_forward_pre_hook(observer.before_forward)
    register_optimizer_step_pre_hook(observer.before_update)
    register_optimizer_step_post_hook(observer.after_update)
    observer.__enter__()

    def finish() -> Notes:
        observer.__exit__(None, None, None)
        return observer.notes

    return finish


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which is all of it unless it is sharded; without its gradient."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights by the names that they have without PyTorch's wrapper for activation checkpointing."""
    return {name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in model.named_parameters()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).clone()


def _tensors(values: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _sent(args: tuple, result: Any) -> Sent:  # noqa: ANN401
    largest = max(_tensors((args, result)), key=torch.Tensor.numel)
    return Sent(largest.numel(), largest.dtype)
