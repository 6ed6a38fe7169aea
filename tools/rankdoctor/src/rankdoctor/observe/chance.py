"""What is random in a call of a model: dropout, noise, statistics of a batch, states of generators."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..trail import note, user_line
from .common import (
    address,
    state,
    state_fingerprint,
)
from .models import models


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
            if isinstance(saved, torch.Tensor) and address(saved) in models.noise:
                models.sampling.add(models.noise[address(saved)])
        nodes += [following for following, _ in node.next_functions if following is not None]


LAYERS = ("/torch/nn/modules/batchnorm.py", "/torch/nn/modules/dropout.py")
"""files of layers that ask their own mode"""


def note_random(what: str, args: tuple) -> None:
    """Remember what is random, or computes with statistics of the batch, in this call of a model."""
    caller = sys._getframe(2).f_code.co_filename
    in_layer = caller.endswith(LAYERS)
    if what == "batch norm" and in_layer and len(args) > 1 and args[1] is None:
        return  # track_running_stats=False, which a layer is told on purpose
    models.random_in[(f"{what} layer" if in_layer else what, user_line())] = None


def wrap_random_layer(position: int, rate_name: str, default: float) -> Callable[[Callable], Callable]:
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


def wrap_attention(own: Callable[..., Any]) -> Callable[..., Any]:
    """Note an attention that drops weights as a layer of dropout."""

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

    noting = wrap_random_layer(2, "p", 0.5)(lambda *_: None)
    return attention
