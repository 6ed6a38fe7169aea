"""Reference: the first update is repeated with a plain copy of the model, and its outputs and gradients are compared.

A rank calls the copy with the inputs, the random state and the gradients of the outputs of the script's own calls. What
belongs to all ranks, such as the mean of the gradients, is computed after the run, from short sketches of them: the
sketch of a sum is the sum of the sketches. So the doctor needs no collective of its own, and cannot hang the script.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..gradients import from_outside
from ..influence import random_state, restore_random, tensors_in
from ..trail import note, user_line
from . import copies
from .common import CONFIG, in_transform, local, optimizers, patch, state, sums
from .influence import core_of
from .model import _is_model as has_weights
from .model import is_synced_norm
from .models import models

BUCKETS = 64
"""numbers of a sketch: it tells the size of a difference within 20 percent"""
HALF = (torch.bfloat16, torch.float16)
LOOKED_AT = (1, 3)
"""updates after which the weights of replicas are compared"""


@dataclass
class Call:
    """A call of the model, in training, that belongs to the first update."""

    args: tuple
    kwargs: dict[str, Any]
    numbers: dict[str, Any]
    """state of the random generators before it"""
    at: str
    half: bool
    """whether the script computes it in 16 bits"""
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """that reached the outputs, by their position"""
    random_layers: int = 0
    nodes: list[Any] = field(default_factory=list)
    """of the graph: those that made the outputs"""
    numbers_of_nodes: tuple[int, int] = (0, 0)
    """of the first node in this call, and of the first one after it"""


class Reference:
    """The model that is looked at, its copy, and the calls since the gradients were zero."""

    wrapped: nn.Module | None = None
    core: nn.Module | None = None
    plain: nn.Module | None = None
    failed = ""
    calls: list[Call] = []  # noqa: RUF012  (one for the process, as the class is)
    done = False
    steps = 0
    versions: dict[str, int] = {}  # noqa: RUF012
    """of the weights when they were copied"""
    after: dict[str, torch.Tensor] = {}  # noqa: RUF012
    """this rank's parts of the gradients after the last backward pass"""


def install() -> None:
    """Observe the calls of the first model, its gradients, and the norms that are computed of them."""
    if not CONFIG.reference or not dist.is_available():
        return
    copies.install()
    patch(nn.Module, "__call__", _call)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patch(nn.utils, name, _clip, nn.utils.clip_grad)
    patch(nn.utils, "get_total_norm", _clip, nn.utils.clip_grad)
    patch(torch.autograd, "backward", _backward)
    patch(Optimizer, "zero_grad", _zero_grad)
    patch(nn.Module, "zero_grad", _zero_grad)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_followed(module):
            return own(module, *args, **kwargs)
        begun = begin(module, args, kwargs)
        first = next_node()
        output = own(module, *args, **kwargs)
        if begun:
            begun.numbers_of_nodes = first, next_node()
            follow(begun, output)
        return output

    return call


def is_followed(module: nn.Module) -> bool:
    """Return whether this is a call of the first model, from outside of it, that leads to the first update."""
    if Reference.done or state.depth or state.in_backward or state.observing or state.loading:
        return False
    if not (module.training and torch.is_grad_enabled() and has_weights(module)) or in_transform():
        return False
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    if Reference.core is None or core_of(module) is Reference.core:
        return True
    if any(module is part for part in Reference.core.modules()):
        Reference.failed = "parts of the model are called by themselves"
    return False


def next_node() -> int:
    """Return the number that the next node of the graph would have."""
    with copies.aside(), torch.enable_grad():
        node: Any = torch.ones(1, requires_grad=True).clone().grad_fn
        return node._sequence_nr()


def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call | None:
    """Remember the inputs of a call, and before the first one a copy of the model."""
    with copies.aside():
        try:
            if Reference.core is None:
                Reference.wrapped, Reference.core = module, core_of(module)
                Reference.plain = copies.plain_copy(Reference.core)
                Reference.versions = versions_of(Reference.core)
            elif not Reference.failed and versions_of(Reference.core) != Reference.versions:
                Reference.failed = "the script changes weights between calls of the model, before its first update"
            if Reference.failed:
                return None
            args, kwargs = copies.copied((args, kwargs))
            return Call(args, kwargs, random_state(), user_line(), is_half(Reference.core))
        except Exception as error:
            Reference.failed = str(error) if isinstance(error, copies.NoCopy) else repr(error)[:200]
            return None


def versions_of(model: nn.Module) -> dict[str, int]:
    """Return how often each weight was changed in place; of sharded ones PyTorch itself changes them."""
    return {} if copies.is_sharded(model) else {name: p._version for name, p in model.named_parameters()}


def is_half(model: nn.Module) -> bool:
    """Return whether a model computes in 16 bits: by its weights, by autocast, or by the policy of fully_shard."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return True
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        policy = getattr(get_state(), "_mp_policy", None) if get_state else None
        if policy and HALF and {policy.param_dtype, policy.reduce_dtype} & set(HALF):
            return True
    return any(p.dtype in HALF for p in model.parameters())


def follow(call: Call, output: Any) -> None:
    """Remember the outputs of a call, and the gradients that will reach them."""
    with copies.aside():
        call.random_layers = models.random_layers
        for number, tensor in enumerate(tensors_in(output)):
            call.outputs.append(tensor.detach().clone())
            if tensor.requires_grad:
                call.nodes.append(tensor.grad_fn)
                tensor.register_hook(lambda gradient, number=number: add(call, number, gradient))
    Reference.calls.append(call)


def add(call: Call, number: int, gradient: torch.Tensor) -> None:
    """Add a gradient that has reached an output: several, if backward goes through it several times."""
    gradient = gradient.detach().clone()
    call.gradients[number] = call.gradients[number] + gradient if number in call.gradients else gradient


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        follows = Reference.core is not None and not (Reference.done or state.observing or state.in_backward)
        if follows and not Reference.failed:
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            Reference.failed = other_ways(losses)
        own(tensors, *args, **kwargs)
        if follows:
            parts = {name: local(p.grad) for name, p in trained() if p.grad is not None}
            Reference.after = {name: part.detach().clone() for name, part in parts.items()}

    return backward


def other_ways(losses: list[torch.Tensor]) -> str:
    """Return a reason if a loss depends on the weights in another way than through the outputs; "" if it does not."""
    assert Reference.core is not None
    weights = {id(p) for p in Reference.core.parameters()}
    stops = {id(node) for call in Reference.calls for node in call.nodes}
    inside = [call.numbers_of_nodes for call in Reference.calls]
    waiting = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or id(node) in stops:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in weights:
            return "the loss uses the weights themselves, and not only the outputs of the model"
        if variable is None and any(first <= node._sequence_nr() < last for first, last in inside):
            return "the loss uses values from inside the model, and not only its outputs"
        waiting += [following for following, _ in node.next_functions]
    return ""


def _zero_grad(own: Callable[..., None]) -> Callable[..., None]:
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if not state.observing and not Reference.done:
            Reference.calls = [call for call in Reference.calls if not call.gradients]
        own(*args, **kwargs)

    return zero_grad


def _clip(own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        first = not Reference.done and not state.observing and compare()
        result = own(tensors, *args, **kwargs)
        names = ("max_norm", "norm_type") if own.__name__ == "clip_grad_norm_" else ("norm_type",)
        kind = (dict(zip(names, args, strict=False)) | kwargs).get("norm_type", 2.0)
        if first and own.__name__ != "clip_grad_value_" and float(kind) == 2.0:
            note_norm(tensors, result)
        return result

    return clip


def note_norm(tensors: list[torch.Tensor], result: torch.Tensor) -> None:
    """Log the norm that the script gets, beside that of the whole gradient, if it is of the copied model alone."""
    assert Reference.core is not None
    given = {id(t) for t in tensors}
    copied = {id(p) for _, p in trained()}
    if any(t.is_leaf and t.grad is not None and id(t) not in copied for t in tensors):
        return  # the script calls other parts of its model, too
    squares = {}
    with copies.aside():
        value = float(copies.full(result))
        for (name, p), square in zip(trained(), Norms.squares, strict=True):
            squares[name] = square if id(p) in given or id(p.grad) in given else None
    found = [square for square in squares.values() if square is not None] or Norms.squares
    note("reference_norm", at=user_line(), value=value, true=sum(found) ** 0.5)


class Norms:
    """The squared norms of the whole gradients, before they are clipped."""

    squares: list[float] = []  # noqa: RUF012  (one for the process, as the class is)


def trained() -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters of the model, with their names."""
    assert Reference.core is not None
    return [(name, p) for name, p in Reference.core.named_parameters() if p.requires_grad]


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if not Reference.done and not state.observing and optimizers.depth <= 1:
        compare()


def compare() -> bool:
    """Repeat the first update with the copy, and log sketches of both gradients. Return whether there was something."""
    calls = [call for call in Reference.calls if call.gradients]
    if Reference.core is None or not (calls or Reference.failed):
        return False
    Reference.done, at, began = True, user_line(), time.perf_counter()
    with copies.aside():
        # Collectives first: all ranks take part in them, whatever follows.
        gradients = [whole_gradient(p) for _, p in trained()]
        Norms.squares = [0.0 if g is None else float(g.double().square().sum()) for g in gradients]
        for call in calls:
            call.outputs = [copies.full(tensor) for tensor in call.outputs]
            call.gradients = {number: copies.full(tensor) for number, tensor in sorted(call.gradients.items())}
        if not Reference.failed:
            try:
                replay(calls)
            except Exception as error:
                Reference.failed = f"the copy could not be called: {type(error).__name__}: {str(error)[:200]}"
    if Reference.failed:
        note("reference_failed", at=at, text=Reference.failed)
    else:
        note_gradients(calls, gradients, at, time.perf_counter() - began)
    Reference.plain, Reference.calls, Reference.after = None, [], {}
    return True


@torch.no_grad()
def whole_gradient(p: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient of a parameter; None if there is none. All ranks that share it call this."""
    if hasattr(p, "full_tensor"):  # zeros, so that a rank without a gradient takes part in the collective too
        return copies.full(p.grad if p.grad is not None else torch.zeros_like(p))
    return None if p.grad is None else copies.full(p.grad)


def replay(calls: list[Call]) -> None:
    """Call the copy as the script has called the model; log by how much the outputs differ."""
    assert Reference.plain is not None and Reference.wrapped is not None
    reject(Reference.wrapped)
    for call in calls:
        restore_random(call.numbers)
        with copies.without_collectives(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            outputs = list(tensors_in(Reference.plain(*call.args, **call.kwargs)))
        shapes = [tuple(t.shape) for t in outputs], [tuple(t.shape) for t in call.outputs]
        if shapes[0] != shapes[1]:
            raise ValueError(f"outputs have shape {shapes[1]}, and {shapes[0]} without sharding: this rank has a part")
        errors = [difference(one, other) for one, other in zip(call.outputs, outputs, strict=True)]
        note(
            "reference_call",
            at=call.at,
            error=max(errors, default=0.0),
            half=call.half,
            random_layers=call.random_layers,
            cls=type(Reference.plain).__name__,
        )
        used = [number for number in call.gradients if outputs[number].requires_grad]
        before, state.in_backward = state.in_backward, True
        try:
            with copies.without_collectives():
                outside = from_outside(outputs, {number: call.gradients[number] for number in used})
                torch.autograd.backward([outputs[k] for k in used], [outside[k] for k in used])
        finally:
            state.in_backward = before


def reject(wrapped: nn.Module) -> None:
    """Raise ValueError for a model whose outputs or gradients are meant to differ from those of one process."""
    if any(is_synced_norm(module) for module in wrapped.modules()):
        raise ValueError("SyncBatchNorm takes its statistics over all ranks")
    group = getattr(wrapped, "process_group", None)
    replicas = dist.get_world_size(group) if group is not None else 1
    meshes = [p.device_mesh.size() for p in wrapped.parameters() if hasattr(p, "device_mesh")]
    together = replicas * max(meshes, default=1)
    if together not in (1, dist.get_world_size()):
        raise ValueError(f"{together} of {dist.get_world_size()} ranks train this model together")
    for hook, _ in getattr(wrapped, "_comm_hooks", []):
        if not any(word in getattr(hook, "__name__", "") for word in ("compress", "allreduce")):
            raise ValueError("a communication hook changes the gradients")


@torch.no_grad()
def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two outputs, relative to the norm of the second one."""
    if not one.is_floating_point() or not one.numel():
        return 0.0
    finite = one.isfinite() & other.isfinite()
    if not bool((finite | (one == other) | (one.isnan() & other.isnan())).all()):
        return float("inf")
    a, b = one[finite].double(), other[finite].double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def note_gradients(calls: list[Call], gradients: list[torch.Tensor | None], at: str, seconds: float) -> None:
    """Log sketches of the gradients of the script and of the copy."""
    assert Reference.plain is not None
    scaler = optimizers.scaler
    scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() and not optimizers.scaled else 1.0
    expected = dict(Reference.plain.named_parameters())
    with copies.aside():
        for (name, p), gradient in zip(trained(), gradients, strict=True):
            wanted = expected[name].grad
            note(
                "reference",
                at=at,
                name=name,
                values=p.numel(),
                wanted=sketch(name, torch.zeros(p.shape) if wanted is None else wanted / scale),
                got=None if gradient is None else sketch(name, gradient),
                touched=is_touched(name, p, scale),
            )
    averaged = isinstance(Reference.wrapped, nn.parallel.DistributedDataParallel) or any(
        hasattr(p, "device_mesh") for _, p in trained()
    )
    half = any(call.half for call in calls)
    note("reference_update", at=at, passes=len(calls), half=half, seconds=seconds, averaged=averaged)


@torch.no_grad()
def is_touched(name: str, p: nn.Parameter, scale: float) -> bool:
    """Return whether the script has changed a gradient after backward, or in a hook."""
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        return True
    if p.grad is None or name not in Reference.after:
        return (p.grad is None) != (name not in Reference.after)
    return not torch.allclose(local(p.grad).double(), Reference.after[name].double() / scale, rtol=1e-3, atol=0.0)


@torch.no_grad()
def sketch(name: str, tensor: torch.Tensor) -> list[float]:
    """Return 64 sums of the values with random signs: the same signs for the same name, whatever the rank.

    The squared norm of a sketch is the squared norm of the tensor, within 20 percent. See Charikar, Chen and
    Farach-Colton, Finding frequent items in data streams, 2002.
    """
    flat = tensor.detach().flatten().double()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
    signed = nn.functional.pad(flat * signs, (0, -flat.numel() % BUCKETS))
    return signed.reshape(-1, BUCKETS).sum(0).tolist()


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if Reference.core is None or optimizers.depth or not Reference.done or Reference.steps >= max(LOOKED_AT):
        return
    Reference.steps += 1
    if Reference.steps in LOOKED_AT:
        with copies.aside():
            note_parts(Reference.core.named_parameters(), user_line())


def note_parts(parameters: Iterable[tuple[str, torch.Tensor]], at: str) -> None:
    """Log the sums of this rank's part of each weight, and which part it is."""
    parts = {name: [part_of(p), *(sums(p) or [])[:2]] for name, p in parameters if local(p).numel()}
    note("parts", at=at, parts=parts)


def part_of(tensor: Any) -> str:
    """Return which part of a sharded tensor this rank has; ranks with the same one are replicas."""
    if not hasattr(tensor, "placements"):
        return ""
    place = tensor.device_mesh.get_coordinate() or []
    return ",".join(
        str(k) for k, placement in zip(place, tensor.placements, strict=True) if not placement.is_replicate()
    )
