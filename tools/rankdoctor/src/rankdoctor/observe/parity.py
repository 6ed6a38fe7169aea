"""Parity: what each update used and did, in numbers that can be compared with a run on another number of ranks."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..trail import note, user_line
from . import copies
from .common import CONFIG, fingerprints, local, optimizers, patch, state
from .model import _is_model as has_weights
from .reference import BUCKETS, is_half, part_of, sketch

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Update:
    """What belongs to the next update."""

    samples: list[int] = []  # noqa: RUF012  (one for the process, as the class is)
    loss = 0.0
    half = False
    squares: dict[str, list[Any]] = {}  # noqa: RUF012
    start: list[float] | None = None
    started = False
    models: list[nn.Module] = []  # noqa: RUF012


def install() -> None:
    """Switch dropout off, and observe inputs, losses, gradients and weights."""
    if not CONFIG.parity:
        return
    for name in DROPOUTS:
        patch(nn.functional, name, _without_dropout)
    patch(nn.functional, "scaled_dot_product_attention", _without_attention_dropout)
    patch(nn.Module, "__call__", _call)
    patch(torch.autograd, "backward", _backward)
    patch(nn.utils, "clip_grad_norm_", _clip, nn.utils.clip_grad)
    patch(nn.utils, "clip_grad_value_", _clip, nn.utils.clip_grad)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _without_dropout(own: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks draw other random numbers for their part of a batch, so dropout cannot be compared."""
    signature = inspect.signature(own)

    def dropout(*args: Any, **kwargs: Any) -> Any:
        named = dict(signature.bind(*args, **kwargs).arguments)
        return own(**named | {"p": 0.0})

    return dropout


def _without_attention_dropout(own: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return own(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        busy = state.depth or state.in_backward or state.observing or state.loading
        if not busy and module.training and torch.is_grad_enabled() and has_weights(module):
            with copies.aside():
                note_inputs(module, (*args, *kwargs.values()))
        return own(module, *args, **kwargs)

    return call


def note_inputs(module: nn.Module, values: tuple) -> None:
    """Remember a number for each sample of the largest input."""
    core = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    if not any(core is known for known in Update.models):
        Update.models.append(core)
    Update.half |= is_half(core)
    flat = [
        v for a in values for v in (a.values() if isinstance(a, dict) else a if isinstance(a, list | tuple) else [a])
    ]
    tensors = [v for v in flat if isinstance(v, torch.Tensor) and v.dim()]
    if tensors:
        largest = local(max(tensors, key=torch.Tensor.numel))
        Update.samples += fingerprints(largest)
    if not Update.started:
        Update.started, Update.start = True, weights_now()
        if CONFIG.nudged:
            nudge()


def _backward(own: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not state.in_backward and not state.observing:
            loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
            if loss.numel() == 1:
                with copies.aside():
                    Update.loss += float(copies.full(loss)) / scale()
        own(tensors, *args, **kwargs)

    return backward


def scale() -> float:
    """Return by how much a GradScaler has multiplied the loss, and so far the gradients too."""
    scaler = optimizers.scaler
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() and optimizers.scaled else 1.0


def _clip(own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not state.observing and not Update.squares:
            with copies.aside():
                Update.squares = squares_now()
        return own(tensors, *args, **kwargs)

    return clip


def squares_now() -> dict[str, list[Any]]:
    """Return for each gradient which part of it this rank has, and the squared norm of this part."""
    found = {}
    for number, model in enumerate(Update.models):
        for name, p in model.named_parameters():
            if p.grad is not None:
                part = local(p.grad).double() / scale()
                found[f"{number}:{name}"] = [part_of(p.grad), float(part.square().sum())]
    return found


def weights_now() -> list[float]:
    """Return a sketch of all weights of the models. All ranks call this."""
    total = torch.zeros(BUCKETS, dtype=torch.float64)
    for number, model in enumerate(Update.models):
        for name, p in model.named_parameters():
            total += torch.tensor(sketch(f"{number}:{name}", copies.full(p)), dtype=torch.float64)
    return total.tolist()


@torch.no_grad()
def nudge() -> None:
    """Change each weight by at most a rounding error of its format, by the same random numbers on all ranks."""
    generator = torch.Generator().manual_seed(0)
    for model in Update.models:
        for part in map(local, model.parameters()):
            if part.is_floating_point():
                signs = torch.randint(-1, 2, part.shape, generator=generator).to(part)
                part.mul_(1 + torch.finfo(part.dtype).eps * signs)


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if not state.observing and optimizers.depth <= 1 and not Update.squares:
        with copies.aside():
            Update.squares = squares_now()


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if optimizers.depth or state.observing:
        return
    with copies.aside():
        note(
            "parity",
            at=user_line(),
            samples=Update.samples,
            loss=Update.loss,
            squares=Update.squares,
            sketch=weights_now(),
            start=Update.start,
            half=Update.half,
        )
    Update.samples, Update.loss, Update.squares, Update.start = [], 0.0, {}, None
