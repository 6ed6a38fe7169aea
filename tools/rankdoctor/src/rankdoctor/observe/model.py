"""Calls of models: in training or validation, wrapped or not, with which inputs; losses, and backward passes."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import contextlib
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..events import weight_key
from ..trail import note, trail, user_line
from .common import (
    CONFIG,
    bags,
    fingerprint,
    fingerprints,
    local,
    optimizers,
    patch,
    quietly,
    state,
    state_fingerprint,
    sums,
)

MOST_CALLS = 1500
"""calls of which the inputs are compared"""
MOST_SAMPLES = 256
LOOKS = 5
"""calls in training in which it is looked for noise that the model scales"""
has_parameters: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


@dataclass
class Models:
    """The models of this process, and what happened since the last update of their weights."""

    numbers: dict[int, int] = field(default_factory=dict)
    """of the models, by their ids"""
    known: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """of parameters, by their ids"""
    inside: dict[int, str] = field(default_factory=dict)
    """lines where a DistributedDataParallel was made, by the ids of the modules in it"""
    calls: int = 0
    random_layers: int = 0
    """calls of dropout or batch norm in training mode, in the present call of a model"""
    random_in: dict[tuple[str, str], None] = field(default_factory=dict)
    """what they are, and their lines; also lines that draw noise"""
    noise: dict[int, str] = field(default_factory=dict)
    """lines that drew normal noise in this call, by the address of its values"""
    others: tuple[object, ...] = ()
    """states of the generators of Python and NumPy before a call in evaluation mode"""
    looked_for_sampling: int = 0
    sampling: set[str] = field(default_factory=set)
    """lines that draw noise which the model scales by a value that it has learned, as a VAE does"""
    dropout_noted: bool = False
    damaged: bool = False
    backwards: list[str] = field(default_factory=list)
    """lines of the backward passes since the last update"""
    losses: list[float] = field(default_factory=list)
    """what was minimized in these passes"""
    zeroed: set[int] = field(default_factory=set)
    """optimizers of which the gradients were zero before a backward pass since their last update"""
    added: set[int] = field(default_factory=set)
    """optimizers to whose old gradients a backward pass has added since their last update"""
    norms: dict[int, float] = field(default_factory=dict)
    """norm of the gradients of each optimizer after backward, as `gradient_norm` says"""
    sizes: dict[int, float] = field(default_factory=dict)
    """of each optimizer: the size of its first gradients after the last backward pass"""
    sharded: dict[int, torch.Tensor] = field(default_factory=dict)
    """sharded parameters that got gradients in the first backward passes, by their ids"""
    for_inputs: bool = False
    """whether the script wants the gradient of an input, since the last backward pass"""
    factors: list[tuple[str, int, float]] = field(default_factory=list)
    """of each loss since the last update: its line, its samples, and how much a sample counts"""
    graphs: list[tuple["weakref.ref[Alive]", str]] = field(default_factory=list)


models = Models()


class Alive:
    """Lives as long as the graph that it is attached to."""


def install() -> None:
    """Observe calls of models, dropout, batch norm, losses, and backward."""
    nn.Module.__call__ = _call(nn.Module.__call__)
    patch(nn.Module, "__init__", _module_init)
    patch(DistributedDataParallel, "__init__", _wrap_ddp)
    patch(nn.Module, "to_empty", _to_empty)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        patch(nn.functional, name, _random_layer(2, "p", 0.5))
    patch(nn.functional, "batch_norm", _random_layer(5, "", 1.0))
    patch(nn.functional, "scaled_dot_product_attention", _attention)
    for name in ("cross_entropy", "nll_loss"):
        patch(nn.functional, name, _loss)
    patch(torch.autograd, "backward", _backward)


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
        if state.training and is_time_for_nan():
            args = tuple(damaged(value) for value in args)
        state.depth, models.random_layers, models.random_in, models.noise = 1, 0, {}, {}
        out = None
        try:
            out = own(module, *args, **kwargs)
            return out
        finally:
            state.depth = 0
            if event:
                note("forward", **event, random_layers=models.random_layers, **(after_call(module, event, out) or {}))

    return call


def is_time_for_nan() -> bool:
    """Return whether this call is the one whose inputs are to be damaged: one in the third update, on one rank."""
    if CONFIG.nan_rank < 0 or trail.step != 2 or models.damaged or not dist.is_initialized():
        return False
    models.damaged = dist.get_rank() == CONFIG.nan_rank
    return models.damaged


def damaged(value: Any) -> Any:
    """Return an input in which the first sample is not a number."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
        return value
    value = value.clone()
    value[0] = float("nan")
    return value


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
    if module.training or event["grad"]:
        return {}
    drew = "rng" in event and (random_state(module), other_states()) != (event["rng"], models.others)
    random_in = [(what, at) for what, at in models.random_in if at not in models.sampling]
    return {"drew": drew and not (models.random_in and not random_in), "random_in": random_in[:5]}


def random_state(module: nn.Module) -> int:
    """Return a number for the state of the generator on the device of a model."""
    weight = next(module.parameters())
    if weight.is_cuda:
        with contextlib.suppress(RuntimeError):  # such as while a graph is captured
            return state_fingerprint(torch.cuda.get_rng_state(weight.device))
    return state_fingerprint(torch.get_rng_state())


def other_states() -> tuple[object, ...]:
    """Return how far the generators of Python and NumPy are."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()[2], numpy and numpy.random.get_state()[1].sum()


def find_sampling(out: Any, most: int = 5000) -> None:
    """Find noise that is multiplied by what has a gradient, or is what the model has to predict: it is meant.

    A variational autoencoder multiplies it by a deviation that it has learned; a diffusion model predicts it.
    """
    outputs = list(out.values()) if isinstance(out, dict) else out if isinstance(out, list | tuple) else [out]
    nodes = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: set[Any] = set()
    while nodes and len(seen) < most:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in ("_saved_self", "_saved_other", "_saved_tensor1", "_saved_tensor2", "_saved_target"):
            saved = getattr(node, name, None)
            if isinstance(saved, torch.Tensor) and saved.data_ptr() in models.noise:
                models.sampling.add(models.noise[saved.data_ptr()])
        nodes += [following for following, _ in node.next_functions if following is not None]


@quietly
def note_call(module: nn.Module, args: tuple, kwargs: dict, grad: bool, at: str) -> dict[str, object]:
    """Return what is known of a call of a model before it."""
    core = module.module if isinstance(module, DistributedDataParallel) else module
    if id(core) not in models.numbers:
        models.numbers[id(core)] = len(models.numbers)
        models.known.append(core)
        name_parameters()
        made = core.__dict__.get("_rankdoctor_made", "?").replace("?", at)
        note("model", model=models.numbers[id(core)], at=at, made=made, **_kind_of(core))
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
        models.for_inputs |= any(any(leaves_that_are_no_weights(one)) for one in inputs if one.requires_grad)
    models.calls += 1
    if models.calls <= MOST_CALLS:
        event |= _inputs(args, kwargs)
        event["rng"] = random_state(core)
        if not module.training and not grad:
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
    largest = local(max(tensors, key=torch.Tensor.numel))
    return {
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


LAYERS = ("/torch/nn/modules/batchnorm.py", "/torch/nn/modules/dropout.py")
"""files of layers that ask their own mode"""


def note_random(what: str, args: tuple) -> None:
    """Remember what is random, or computes with statistics of the batch, in this call of a model."""
    caller = sys._getframe(2).f_code.co_filename
    in_layer = caller.endswith(LAYERS)
    if what == "batch norm" and in_layer and len(args) > 1 and args[1] is None:
        return  # track_running_stats=False, which a layer is told on purpose
    models.random_in[(f"{what} layer" if in_layer else what, user_line())] = None


def _random_layer(position: int, rate_name: str, default: float) -> Callable[[Callable], Callable]:
    """Wrap a function that takes ``training``, as argument number ``position``, and a rate of dropout."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def layer(*args: Any, **kwargs: Any) -> Any:
            training = kwargs.get("training", args[position] if len(args) > position else rate_name == "p")
            rate = kwargs.get(rate_name, args[1] if rate_name == "p" and len(args) > 1 else default)
            if training and rate and not state.observing:
                models.random_layers += 1
                if state.depth and not torch.is_grad_enabled():
                    note_random("dropout" if rate_name else "batch norm", args)
                if rate_name and state.training and not models.dropout_noted:
                    models.dropout_noted = True
                    note("dropout", at=user_line())
            return own(*args, **kwargs)

        return layer

    return wrap


def _attention(own: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p:
            noting(query, dropout_p, True)
        return own(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    noting = _random_layer(2, "p", 0.5)(lambda *_: None)
    return attention


def _loss(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = own(input, target, *args, **kwargs)
        is_new = "_rankdoctor_followed" not in out.__dict__  # the stand-in's mode lets torch call this function again
        if state.training and not state.observing and out.requires_grad and is_new:
            out.__dict__["_rankdoctor_followed"] = True
            named = (
                dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False))
                | kwargs
            )
            _follow(out, target, named)
        return out

    return loss


@quietly
def _follow(out: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> None:
    """Log in backward with which factor each sample of this loss counts in what is minimized."""
    if target.dtype != torch.int64:
        return
    kept = target[target != options.get("ignore_index", -100)]
    weight = options.get("weight")
    count = 1.0
    if out.dim():  # reduction="none": the script adds them up itself
        place = user_line()
        out.register_hook(lambda gradient: note_factor(place, gradient))
        return
    if options.get("reduction", "mean") == "mean":
        count = (float(weight[kept].sum()) if weight is not None else float(kept.numel())) or 1.0
    at, samples = user_line(), int(kept.numel())
    out.register_hook(lambda factor: models.factors.append((at, samples, float(factor.detach()) / count)))


@quietly
def note_factor(at: str, gradient: torch.Tensor) -> None:
    """Remember how much each sample counts, if all that count do so alike."""
    counted = gradient[gradient != 0].abs()
    if counted.numel() and float(counted.max()) <= 1.01 * float(counted.min()):
        models.factors.append((at, int(counted.numel()), float(counted.mean())))


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if state.in_backward:  # reentrant checkpointing calls it within a backward pass
            return own(tensors, *args, **kwargs)
        note_backward(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)), user_line())
        before = gradient_sizes() or {}
        state.in_backward = True
        try:
            own(tensors, *args, **kwargs)
        finally:
            state.in_backward = False
        return note_gradients(before)

    return backward


@quietly
def note_backward(loss: torch.Tensor, at: str) -> None:
    """Remember a backward pass, and whether its graph stays in memory."""
    models.backwards.append(at)
    models.losses.append(float(local(loss)) if loss.numel() == 1 else 0.0)
    token, node = Alive(), loss.grad_fn
    models.graphs.append((weakref.ref(token), at))
    for _ in range(3):  # the script may keep the loss, but not what it made of it for this call, such as a scaled loss
        if node is None or type(node).__name__ == "AccumulateGrad":  # which lives as long as the weight
            break
        node.metadata["rankdoctor"] = token
        node = node.next_functions[0][0] if node.next_functions else None


def sizes_now() -> dict[int, float]:
    """Return the size of the gradients of each optimizer."""
    return {number: gradient_size(one) for number, known in optimizers.known.items() if (one := known())}


gradient_sizes = quietly(sizes_now)


def gradient_norm(optimizer: Optimizer) -> float:
    """Return the norm of the same gradients as `gradient_size`."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return sum(float(local(p.grad).double().square().sum()) for p in itertools.islice(parameters, 5)) ** 0.5


def gradient_size(optimizer: Optimizer) -> float:
    """Return the sum of the absolute values of the first five gradients, of the parts that this rank has."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return sum(float(local(p.grad).double().abs().sum()) for p in itertools.islice(parameters, 5))


@quietly
def note_gradients(before: dict[int, float]) -> None:
    """Remember which gradients were zero before a backward pass, to which old ones it has added, and their sizes."""
    models.sizes = sizes_now()
    models.norms = {number: gradient_norm(one) for number, known in optimizers.known.items() if (one := known())}
    if sum(optimizers.updates.values()) < 3:
        for p in (p for model in models.known for p in model.parameters()):
            if hasattr(p, "device_mesh") and p.requires_grad and p.grad is not None:
                models.sharded[id(p)] = p
    for number, size in before.items():
        if size == 0:
            models.zeroed.add(number)
        elif models.sizes.get(number) != size:
            models.added.add(number)


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
