"""Process groups, and the collectives that the script or a library other than torch calls."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..trail import note, trail, user_line
from . import passes, returned, totals, works
from .common import CONFIG, address, local, optimizers, patch, quietly, state
from .models import models
from .optimizer import wait_for_the_end

NAMES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
]
"""of PyTorch 2.11 to 2.15; some versions lack some of them"""
MOST_TOTALS = 8
"""numbers in a sum over the ranks that is logged"""
MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
FUNCTIONAL_NAMES = (
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
)
FUNCTIONAL = ("_functional_collectives", "nn.functional")
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")
TORCH = os.path.dirname(torch.__file__)


def install() -> None:
    """Observe `torch.distributed`."""
    if not dist.is_available():
        return
    for name in NAMES:
        if hasattr(dist, name):
            patch(dist, name, _collective(name), dist.distributed_c10d)
    for name in MESSAGES:
        patch(dist, name, _message, dist.distributed_c10d)
    functional, differentiable = (importlib.import_module(f"torch.distributed.{name}") for name in FUNCTIONAL)
    for name in FUNCTIONAL_NAMES:
        if hasattr(functional, name):
            patch(functional, name, _functional(name))
    for name in ("all_reduce", "all_gather", "reduce", "gather", "reduce_scatter", "all_to_all"):
        patch(differentiable, name, _functional(name))
    patch(dist, "init_process_group", _init, dist.distributed_c10d, dist.device_mesh)
    patch(dist, "new_group", _group, dist.distributed_c10d, dist.device_mesh)
    for name in ("set_timeout", "_set_pg_timeout"):
        if hasattr(dist.distributed_c10d, name):
            patch(dist.distributed_c10d, name, _timeout)
    sharded = importlib.import_module("torch.distributed.tensor").DTensor
    for name in ("item", "__float__"):
        patch(sharded, name, _value_of_sharded)
    patch(dist.algorithms.join.Join, "__init__", _join)
    patch(sys.modules["torch.multiprocessing.spawn"], "start_processes", _spawn, torch.multiprocessing)


def observe_accelerate() -> None:
    """Observe accelerate, which has just been imported: its loaders repeat samples, and this takes them away again."""
    accelerator = sys.modules["accelerate"].Accelerator

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            note("trimmed", loader=state.loader)
            return own(*args, **kwargs)

        return gather

    patch(accelerator, "gather_for_metrics", wrap)


def _message(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that sends or receives: log it, also in the forward of a model."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not state.observing and trail.caller_is_outside(TORCH):
            returned.Returned.exchanges += 1
            if not state.depth:
                note("message", at=user_line(), overwrites=overwrites(own, args), backward=state.in_backward)
            elif state.training:
                needs = any(getattr(forward_of_function(), "needs_input_grad", ()))
                note("inner", name="message", at=user_line(), sums=False, features=False, in_function=needs)
        return own(*args, **kwargs)

    return call


def _timeout(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that sets the timeout of a group: log it when it is called outside of a model."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not state.depth and not state.observing and trail.caller_is_outside(TORCH):
            note("timeout", at=user_line())
        return own(*args, **kwargs)

    return call


@quietly
def overwrites(receive: Callable[..., Any], args: tuple) -> bool:
    """Return whether a message comes into the memory of an input of a model whose backward pass is still to come.

    Backward does not notice, because a message does not change the version of a tensor.
    """
    tensor = args[0] if args and receive.__name__ in ("recv", "irecv") else None
    awaited = models.awaited.get(address(tensor)) if isinstance(tensor, torch.Tensor) else None
    return awaited is not None and awaited.grad is None


def _functional(name: str) -> Callable[[Callable], Callable]:
    """Wrap a collective that returns its result: log it when the script or another library calls it."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if state.depth or state.observing or Inside.collective or not trail.caller_is_outside(TORCH):
                return own(*args, **kwargs)
            returned.Returned.exchanges += 1
            note("functional", at=user_line(), name=name)
            totals.totals.exchanged |= optimizers.depth > 0
            Inside.collective = True
            try:
                return own(*args, **kwargs)
            finally:
                Inside.collective = False

        return call

    return wrap


class Inside:
    """Whether a collective is being called: some call others."""

    collective = False


def _collective(name: str) -> Callable[[Callable], Callable]:
    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if Inside.collective or state.observing or not trail.caller_is_outside(TORCH):
                return own(*args, **kwargs)
            returned.Returned.exchanges += 1
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if name in GATHERS and (function := forward_of_function()) is not None:
                returned.follow(function, user_line(), group_of(args, kwargs))
            if state.depth:  # such as in a loss that is a part of the wrapped model
                sums = name == "all_reduce" and op_of(args, kwargs) == dist.ReduceOp.SUM and in_a_function(tensors)
                note("inner", name=name, at=user_line(), sums=sums, **features_of(tensors))
            else:
                note_collective(name, tensors, args, kwargs, sys._getframe(1).f_code.co_filename)
            if (
                name == "all_reduce"
                and not state.depth
                and not optimizers.depth
                and is_gradient(next(iter(tensors), None))
            ):
                passes.before_reduction()
            totals.totals.exchanged |= optimizers.depth > 0
            is_sum = name == "all_reduce" and bool(tensors) and op_of(args, kwargs) == dist.ReduceOp.SUM
            part = totals.before(tensors[0]) if is_sum else None
            Inside.collective = True
            try:
                result = own(*args, **kwargs)
            finally:
                Inside.collective = False
            if tensors:
                works.begin(result, tensors[0])
            if is_sum and not state.depth and not optimizers.depth:
                note_reduced(tensors[0])
            if is_sum and not kwargs.get("async_op"):
                note_sum(tensors[0])
                totals.after(tensors[0], part, totals.world_of(kwargs, args), is_gradient(tensors[0]))
            if CONFIG.probe_gathers and name in GATHERS and state.training:
                follow(args[0] if args else next(iter(kwargs.values())), user_line())
            return result

        return collective

    return wrap


def follow(gathered: Any, at: str) -> None:
    """Log if gathered tensors, which have no graph, get a gradient: then the loss depends on them."""
    used = False

    def hook(gradient: torch.Tensor) -> None:
        nonlocal used
        if not used:
            used = True
            note("gathered_used", at=at)

    for tensor in gathered if isinstance(gathered, list | tuple) else [gathered]:
        if tensor.is_floating_point() and tensor.is_leaf and not tensor.requires_grad:
            tensor.requires_grad_().register_hook(hook)


def features_of(tensors: list[torch.Tensor]) -> dict[str, bool]:
    """Return whether a collective got features that need gradients, and whether a Function of the script's called it.

    In the forward of a torch.autograd.Function no graph is made, although its tensors need gradients.
    """
    features = any(t.requires_grad and t.dim() > 1 for t in tensors)
    return {"features": features, "in_function": features and not torch.is_grad_enabled()}


def in_a_function(tensors: list[torch.Tensor]) -> bool:
    """Return whether the forward of a torch.autograd.Function has called a collective, in training, for activations."""
    if not any(t.dim() > 1 and t.is_floating_point() for t in tensors):
        return False
    return forward_of_function() is not None


def forward_of_function() -> Any:
    """Return the context of the torch.autograd.Function in whose forward this is called, in training; None outside.

    It has no graph, like the forward of a module under no_grad, whose first argument is the module.
    """
    if not state.training or torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
            return None if isinstance(first, torch.nn.Module) else first
        frame = frame.f_back
    return None


def note_collective(name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict[str, Any], caller: str) -> None:
    """Log a collective outside of models, which a function in the file ``caller`` calls."""
    tensor = tensors[0] if tensors else None
    group = group_of(args, kwargs)
    note(
        "collective",
        name=name,
        at=user_line(),
        size=None if tensor is None else tensor.numel(),
        everyone=group is None or group is dist.group.WORLD,
        own=trail.kind_of(caller) > 0,
        gradient=is_gradient(tensor),
        **features_of(tensors),
        backward=state.in_backward,
        in_step=optimizers.depth > 0,
        passes=len(models.backwards),
    )


def group_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the process group that a collective is called with; None if it is that of all ranks."""
    return kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)


def op_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return how an all_reduce combines the values of the ranks."""
    return kwargs.get("op", args[1] if len(args) > 1 else dist.ReduceOp.SUM)


@quietly
def note_reduced(tensor: torch.Tensor) -> None:
    """Remember the size of gradients that the script has added up over the ranks itself."""
    if is_gradient(tensor):
        optimizers.reduced += float(local(tensor).double().abs().sum())


@quietly
def note_sum(tensor: torch.Tensor) -> None:
    """Log what a validation has added up, if it is only a few numbers: one may be the number of samples."""
    is_result = not state.training and not optimizers.depth and not hasattr(tensor, "to_local")
    if is_result and tensor.numel() <= MOST_TOTALS and not tensor.is_complex():
        note("sum", at=user_line(), totals=tensor.detach().double().flatten().tolist())


def is_gradient(tensor: torch.Tensor | None) -> bool:
    """Return whether this is the gradient of a weight in an optimizer, or has all of them one after the other."""
    if tensor is None:
        return False
    found = [one for known in optimizers.known.values() if (one := known())]
    for one in found:
        sizes = [p.grad.numel() for group in one.param_groups for p in group["params"] if p.grad is not None]
        if len(sizes) > 1 and tensor.dim() == 1 and tensor.numel() == sum(sizes):
            return True
    place = address(tensor)  # of p.grad.data too, which is another object
    return any(
        p.grad is not None and (p.grad is tensor or address(p.grad) == place != 0)
        for one in found
        for group in one.param_groups
        for p in group["params"]
        if not hasattr(p.grad, "to_local")
    )


def _init(own: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, **kwargs: Any) -> None:
        kwargs = redirected(args, kwargs)
        limit = kwargs.get("timeout")
        own(*args[:1], **kwargs)
        state.world = dist.get_world_size()
        note(
            "init",
            at=user_line(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            seed=torch.initial_seed() % (1 << 53),
            timeout=limit and limit.total_seconds(),
        )

    return init


def _value_of_sharded(own: Callable[..., float]) -> Callable[..., float]:
    def value(tensor: Any) -> float:
        parts = [str(one) for one in tensor.placements if not one.is_replicate()]
        if parts and not state.observing and trail.user_calls_library():
            note("part", at=user_line(), placement=parts[0])
        return own(tensor)

    return value


def _group(own: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        limit = kwargs.get("timeout", args[1] if len(args) > 1 else None)
        ranks = kwargs.get("ranks", args[0] if args else None)
        if trail.user_calls_library():  # and not init_device_mesh, which needs other groups on CPUs than on GPUs
            note("group", at=user_line(), ranks=ranks and list(ranks), timeout=limit and limit.total_seconds())
        return own(*args, **kwargs)

    return new_group


def redirected(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with the address of the doctor's own port."""
    named = dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args, strict=False)) | kwargs
    if args:
        del named["backend"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(CONFIG.port))
    if named.get("store") is None and str(named.get("init_method", "env")).startswith(("tcp", "file")):
        named["init_method"] = "env://"
    return named


def _join(own: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, **kwargs: Any) -> None:
        note("join", at=user_line())
        own(*args, **kwargs)

    return init


def _spawn(own: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        note("spawn", at=user_line())
        if CONFIG.started > 1:
            wait_for_the_end("spawn")  # the doctor started all ranks of this node, and so does the script
        return own(*args, **kwargs)

    return start
