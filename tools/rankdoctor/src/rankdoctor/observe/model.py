"""Calls of models: in training or validation, wrapped or not, with which inputs."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..events import weight_key
from ..trail import note, trail, user_line
from . import damage, frozen
from .backward import wrap_backward, wrap_loss
from .chance import find_sampling, other_states, random_state, wrap_attention, wrap_random_layer
from .common import (
    CONFIG,
    address,
    bags,
    fingerprint,
    fingerprints,
    in_transform,
    local,
    optimizers,
    patch,
    quietly,
    state,
    sums,
)
from .models import models

MOST_CALLS = 1500
"""calls of which the inputs are compared"""
MOST_SAMPLES = 4096 if CONFIG.frozen else 256
MOST_FURTHER = 3
"""inputs beside the largest whose rows are compared: it may hold what is drawn anew, such as neighbors in a graph"""
LOOKS = 5
"""calls in training in which it is looked for noise that the model scales"""
has_parameters: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def install() -> None:
    """Observe calls of models, dropout, batch norm, losses, and backward."""
    nn.Module.__call__ = _call(nn.Module.__call__)
    patch(nn.Module, "__init__", _module_init)
    patch(DistributedDataParallel, "__init__", _wrap_ddp)
    patch(nn.Module, "to_empty", _to_empty)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        patch(nn.functional, name, wrap_random_layer(2, "p", 0.5))
    patch(nn.functional, "batch_norm", wrap_random_layer(5, "", 1.0))
    patch(nn.functional, "scaled_dot_product_attention", wrap_attention)
    for name in ("cross_entropy", "nll_loss"):
        patch(nn.functional, name, wrap_loss)
    patch(torch.autograd, "backward", wrap_backward)


def _module_init(own: Callable[..., None]) -> Callable[..., None]:
    """Remember the line of the script that makes a module: not one of the module's own __init__."""

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        own(module, *args, **kwargs)
        module.__dict__["_rankdoctor_made"] = user_line(lambda frame: _is_init_of(frame, module))

    return init


def _is_init_of(frame: FrameType, module: nn.Module) -> bool:
    return frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.depth or state.in_backward or state.observing or state.loading or not _is_model(module):
            return own(module, *args, **kwargs)
        event = note_call(module, args, kwargs, torch.is_grad_enabled(), user_line())
        state.training = module.training and torch.is_grad_enabled()
        without_number = False
        if state.training and damage.is_time_for_nan():
            without_number = not damage.has_numbers(args)  # a model of tokens: its outputs are damaged instead
            args = tuple(damage.changed(value, damage.with_nan) for value in args)
        state.depth, models.random_layers, models.random_in, models.noise = 1, 0, {}, {}
        out = None
        try:
            out = own(module, *args, **kwargs)
            if CONFIG.frozen and not module.training and not torch.is_grad_enabled():
                noisy = frozen.spread(args, out)
                out = out if noisy is None else noisy
            return damaged(module, out, without_number)
        finally:
            state.depth = 0
            if event:
                note("forward", **event, random_layers=models.random_layers, **(after_call(module, event, out) or {}))

    return call


def damaged(module: nn.Module, out: Any, without_number: bool) -> Any:
    """Return the outputs of a model, damaged if this run does that."""
    if without_number:
        return damage.changed(out, lambda value: value * float("nan"))
    if damage.is_outlier(module, state.training):
        return damage.changed(out, damage.far_off)
    return out


def _is_model(module: nn.Module) -> bool:
    if module not in has_parameters:
        has_parameters[module] = next(module.parameters(), None) is not None
    return has_parameters[module]


@quietly
def after_call(module: nn.Module, event: dict[str, object], out: Any) -> dict[str, object]:
    """Return what a call in evaluation mode had of chance in it; see after one in training which noise is scaled."""
    if models.noise and module.training and models.looked_for_sampling < LOOKS:
        models.looked_for_sampling += 1
        find_sampling(out)
    if module.training:
        return {}
    drew = "rng" in event and (random_state(module), other_states()) != (event["rng"], models.others)
    random_in = [(what, at) for what, at in models.random_in if at not in models.sampling]
    return {"drew": drew and not (models.random_in and not random_in), "random_in": random_in[:5]}


@quietly
def note_call(module: nn.Module, args: tuple, kwargs: dict, grad: bool, at: str) -> dict[str, object]:
    """Return what is known of a call of a model before it."""
    core = module.module if isinstance(module, DistributedDataParallel) else module
    if is_new := id(core) not in models.numbers:
        models.numbers[id(core)] = len(models.numbers)
        models.known.append(core)
        name_parameters()
        made = core.__dict__.get("_rankdoctor_made", "?").replace("?", at)
        note("model", model=models.numbers[id(core)], at=at, made=made, **_kind_of(core))
    if CONFIG.frozen:
        number, evaluates = models.numbers[id(core)], not module.training and not grad
        frozen.before_call(models.known, number, is_new=is_new, evaluates=evaluates)
    event: dict[str, object] = {
        "model": models.numbers[id(core)],
        "cls": type(core).__name__,
        "train": module.training,
        "grad": grad,
        "loader": state.loader,
        "at": at,
    }
    if isinstance(module, DistributedDataParallel):
        event |= {"ddp": True, "sync": bool(module.require_backward_grad_sync)}
    elif id(core) in models.inside:
        event["inside"] = models.inside[id(core)]
    is_synced = isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
    if not module.training and not is_synced:
        norms = [m for m in core.modules() if _has_statistics(m)]
        event["buffers"] = [fingerprint(m.running_mean) for m in norms]
        event["untouched"] = sum(_is_as_made(m) for m in norms)
    if grad:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        models.awaited.update((address(one), one) for one in inputs if one.requires_grad and one.is_leaf)
        if any(any(leaves_that_are_no_weights(one)) for one in inputs if one.requires_grad):
            models.for_inputs = event["for_inputs"] = True
    models.calls += 1
    if models.calls <= MOST_CALLS and not in_transform():
        event |= _inputs(args, kwargs)
        if grad:
            models.lengths = {len(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()}
        event["rng"] = random_state(core)
        if not module.training:
            models.others = other_states()
    return event


def leaves_that_are_no_weights(tensor: torch.Tensor, most: int = 50) -> Iterator[bool]:
    """Yield for each leaf that a tensor was computed from in a few steps whether it is no weight."""
    if tensor.is_leaf:
        yield id(tensor) not in models.names
    nodes = [tensor.grad_fn]
    for _ in range(most):
        node = nodes.pop() if nodes else None
        if node is None:
            return
        if hasattr(node, "variable"):
            yield not isinstance(node.variable, nn.Parameter) and id(node.variable) not in models.names
        nodes += [following for following, _ in node.next_functions if following is not None]


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None and not is_synced_norm(module)


def _is_as_made(norm: nn.Module) -> bool:
    """Return whether a batch norm has the statistics with which it was made: mean 0, variance 1."""
    return not bool(norm.running_mean.any()) and bool((norm.running_var == 1).all())


def is_synced_norm(module: nn.Module) -> bool:
    """Return whether this batch norm takes its statistics over all ranks."""
    return isinstance(module, nn.SyncBatchNorm)


def _kind_of(core: nn.Module) -> dict[str, object]:
    modules = list(core.modules())
    norms = [m for m in modules if isinstance(m, _BatchNorm)]
    wrappers = {name for m in modules for name in _bases(m)}
    fsdp = "FullyShardedDataParallel" in wrappers
    meshes = [p.device_mesh.ndim for p in core.parameters() if hasattr(p, "device_mesh")]
    return {
        "cls": type(core).__name__,
        "parameters": sum(1 for _ in core.parameters()),
        "size": sum(p.numel() for p in core.parameters() if not is_lazy(p)),
        "sharded": fsdp or bool(meshes),
        "groups": sum(type(m).__name__ == "FullyShardedDataParallel" or "FSDPModule" in _bases(m) for m in modules),
        "blocks": max(map(_equal_children, modules)),
        "mesh_dims": max(meshes, default=0),
        "tensor_parallel": bool(meshes) and not fsdp and "FSDPModule" not in wrappers,
        "local_norms": sum(not is_synced_norm(m) for m in norms),
    }


def _bases(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def _equal_children(module: nn.Module) -> int:
    """Return how many blocks of one kind, with weights, this module has in a row."""
    children = list(module.children())
    alike = len({type(child) for child in children}) == 1 and all(any(True for _ in c.parameters()) for c in children)
    return len(children) if alike else 0


MOST_BUFFERS = 50


def kept_buffers() -> dict[str, list[float] | None]:
    """Return the sums of the buffers of the wrapped models that hold real numbers, other than those of batch norm."""
    found: dict[str, list[float] | None] = {}
    for number, model in enumerate(models.known):
        for inside, module in model.named_modules() if id(model) in models.inside else ():
            for name, buffer in module.named_buffers(recurse=False):
                if isinstance(module, _BatchNorm) or not buffer.is_floating_point() or buffer.numel() > 10**7:
                    continue
                if len(found) < MOST_BUFFERS:
                    found[weight_key(number, f"{inside}.{name}".lstrip("."))] = sums(buffer)
    return found


def name_parameters() -> None:
    """Learn the names of all parameters: also of those that were replaced since, as sharding does."""
    for number, model in enumerate(models.known):
        models.names |= {id(p): weight_key(number, name) for name, p in model.named_parameters()}


def _inputs(args: tuple, kwargs: dict) -> dict[str, object]:
    values = [*args, *kwargs.values()]
    values += [
        v for a in values if isinstance(a, list | tuple | dict) for v in (a.values() if isinstance(a, dict) else a)
    ]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim() and not v.is_meta and not v.is_sparse]
    if not tensors:
        return {}
    largest = max(tensors, key=torch.Tensor.numel)
    further = [v for v in tensors if v is not largest][:MOST_FURTHER]
    largest = local(largest)
    return {
        "further": [fingerprints(local(value)[:MOST_SAMPLES]) for value in further],
        "samples": len(largest),
        "rows": fingerprints(largest[:MOST_SAMPLES]),
        "bags": bags(largest[:MOST_SAMPLES]),
    }


def _wrap_ddp(own: Callable[..., None]) -> Callable[..., None]:
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        own(self, module, *args, **kwargs)
        at = user_line()
        models.inside |= {id(inner): at for inner in module.modules()}
        frozen = sum(not p.requires_grad for p in module.parameters())
        unused = bool(self.find_unused_parameters or self.static_graph)
        note(
            "ddp",
            at=at,
            cls=type(module).__name__,
            frozen=frozen,
            find_unused=unused,
            broadcast=bool(self.broadcast_buffers),
            among=dist.get_world_size(self.process_group),
        )

    return init


def _to_empty(own: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Fill uninitialized memory with NaN, so that weights that are never initialized are always noticed."""

    def to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        module = own(module, *args, **kwargs)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point() and not tensor.is_meta:
                    local(tensor).fill_(float("nan"))
        note("empty", at=user_line())
        return module

    return to_empty


def finish() -> None:
    """Log which trainable parameters are in no optimizer, and the number of samples of the models."""
    for number, model in enumerate(models.known):
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        orphans = [name for name, p in trainable if id(p) not in optimizers.held]
        note(
            "trainable",
            model=number,
            parameters=len(trainable),
            orphans=orphans[:300],
            orphans_with_gradient=sum(p.grad is not None for _, p in trainable if id(p) not in optimizers.held),
        )
    note_sharded()
    trail.file.flush()


def note_sharded() -> None:
    """Log which sharded parameters with gradients are in no optimizer."""
    orphans = [models.names.get(number, "?") for number in models.sharded if number not in optimizers.held]
    note("sharded", parameters=len(models.sharded), orphans=orphans)
