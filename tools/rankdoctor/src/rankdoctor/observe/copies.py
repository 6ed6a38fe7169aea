"""Plain copies of models: as they were before they were sharded, with the weights that they have now."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..influence import random_state, restore_random
from .collectives import MESSAGES, NAMES
from .common import address, patch, state

PLACES = {
    "fully_shard": (
        "torch.distributed.fsdp",
        "torch.distributed.fsdp._fully_shard",
        "torch.distributed._composable.fsdp",
    ),
    "parallelize_module": ("torch.distributed.tensor.parallel",),
}
"""functions that change a module in place, and the modules that offer them"""


OWN_GENERATOR = "the model draws from a generator of the script's own"


class Kept:
    """The copies of this process."""

    installed = False
    memo: dict[int, Any] = {}  # noqa: RUF012  (one for the process, as the class is)
    """of all deep copies: blocks that were sharded one by one become parts of the copy of the whole model"""
    failed = ""


class NoCopy(Exception):
    """There is no plain copy of a model; the message says why."""


def install() -> None:
    """Keep a copy of each module before it is changed."""
    if Kept.installed or not dist.is_available():
        return
    Kept.installed = True
    for name, modules in PLACES.items():
        places = [importlib.import_module(module) for module in modules]
        patch(places[0], name, _copy_first, *places[1:])


def _copy_first(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        with aside():
            for one in module if isinstance(module, list | tuple) else [module]:
                try:
                    copy.deepcopy(one, Kept.memo)
                except Exception as error:  # a module that holds a process group, for example
                    Kept.failed = f"{type(one).__name__} cannot be copied: {type(error).__name__}: {str(error)[:120]}"
        return own(module, *args, **kwargs)

    return call


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Compute without being observed, and without changing the random numbers of the script."""
    before, numbers = state.observing, random_state()
    state.observing = True
    try:
        yield
    finally:
        state.observing = before
        restore_random(numbers)


def is_sharded(model: nn.Module) -> bool:
    """Return whether any weight of a model is sharded, or replicated by a device mesh."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


@torch.no_grad()
def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a tensor, which all ranks of its mesh call, on the CPU and in 32 bits."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    whole = whole.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return whole.clone() if address(whole) == address(tensor) or whole is tensor else whole


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy for one process, on the CPU and in 32 bits. All ranks call this. Raises NoCopy."""
    values = {name: full(p) for name, p in model.named_parameters()}  # collectives first, on all ranks alike
    buffers = {name: full(buffer) for name, buffer in model.named_buffers()}
    if any(isinstance(held, torch.Generator) for module in model.modules() for held in vars(module).values()):
        raise NoCopy(OWN_GENERATOR)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise NoCopy("FullyShardedDataParallel keeps its weights in one long tensor (fully_shard can be judged)")
    try:
        plain = copy.deepcopy(model, Kept.memo)
    except Exception as error:
        reason = Kept.failed or f"the model cannot be copied: {type(error).__name__}: {str(error)[:120]}"
        raise NoCopy(reason) from None
    wanted = dict(plain.named_parameters())
    if wanted.keys() != values.keys():
        odd = sorted(wanted.keys() ^ values.keys())
        raise NoCopy(f"the modules were changed after the model was sharded ({odd[0]})")
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    new = {id(p): nn.Parameter(values[name], trained[name]) for name, p in wanted.items()}
    held = {id(buffer): buffers[name] for name, buffer in plain.named_buffers() if name in buffers}
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in plain.named_modules():
        module.training = modes.get(name, module.training)
        module._parameters |= {key: new[id(p)] for key, p in module._parameters.items() if p is not None}
        module._buffers |= {key: held[id(b)] for key, b in module._buffers.items() if b is not None and id(b) in held}
    return plain


def copied(values: Any) -> Any:
    """Return arguments or outputs with copies of their tensors: whole ones, on the CPU, floats in 32 bits.

    Raises NoCopy for a generator of random numbers: a second call would draw other ones, and leave the script others.
    """
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(values)):
        raise NoCopy(OWN_GENERATOR)
    return tree_map(lambda leaf: full(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)


def rank() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Let a collective or a message in the forward of the copy raise an error: other ranks would take no part in it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the model's own forward or backward calls a collective, or sends a message")

    functional = torch.distributed._functional_collectives
    places = [(place, name) for place in (dist, dist.distributed_c10d) for name in (*NAMES, *MESSAGES)]
    places += [(functional, name) for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor")]
    kept = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    try:
        for place, name, _ in kept:
            setattr(place, name, refuse)
        yield
    finally:
        for place, name, original in kept:
            setattr(place, name, original)
