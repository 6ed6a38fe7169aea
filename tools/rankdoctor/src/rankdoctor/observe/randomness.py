"""Which random numbers the samples of each loader process are made with, and the noise in a step."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data

from ..trail import note, trail, user_line
from .common import CONFIG, address, fingerprint, patch, state, state_fingerprint
from .models import models

FETCHES = 2
"""batches of each process that are looked at"""
NOISE = ("rand", "randn", "rand_like", "randn_like")
"""functions that draw noise for a whole batch"""
IN_MODELS = ("normal", "bernoulli", "rand", "randn", "rand_like", "randn_like", "randint", "multinomial")
"""functions that a model may draw random numbers with"""
IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "bernoulli")
MOST_NOISE = 40
"""draws of each process that are looked at"""


class Seen:
    """Counts the batches of this process."""

    pid = 0
    fetches = 0
    noise = 0


def install() -> None:
    """Observe what fetches samples, in the workers of a loader or in the training process."""
    for fetcher in (data._utils.fetch._MapDatasetFetcher, data._utils.fetch._IterableDatasetFetcher):
        patch(fetcher, "fetch", _fetch)
    patch(torch, "manual_seed", _seed("torch"), torch.random)
    for name in NOISE:
        patch(torch, name, _noise)
    for name in IN_MODELS:
        patch(torch, name, _in_model("rand" not in name or "randn" in name))
    for name in IN_PLACE:
        patch(torch.Tensor, name, _in_model(name == "normal_"))
    patch(torch, "set_rng_state", _set_state("torch"), torch.random)
    # on the stand-in, numbers of "GPU" tensors come from the generator of the CPU
    patch(torch.cuda, "set_rng_state", _set_state("torch" if CONFIG.standin else "cuda"), torch.cuda.random)
    patch(random, "seed", _seed("random"))
    patch(random, "setstate", _set_state("random"))
    if "numpy" in sys.modules:
        patch(sys.modules["numpy"].random, "seed", _seed("numpy"))
        patch(sys.modules["numpy"].random, "set_state", _set_state("numpy"))


def _set_state(generator: str) -> Callable[[Callable], Callable]:
    """Log which line of the script gives a generator a whole state, such as one from a checkpoint."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(new: Any, *args: Any, **kwargs: Any) -> Any:
            if not state.observing and trail.user_calls_library():
                value = state_fingerprint(new) if isinstance(new, torch.Tensor) else zlib.crc32(repr(new).encode())
                note("seed", generator=generator, value=value, at=user_line(), whole=True)
            return own(new, *args, **kwargs)

        return set_state

    return wrap


def _in_model(is_normal: bool) -> Callable[[Callable], Callable]:
    """Remember what a model draws in a call: in evaluation mode the line, in training the noise that it may scale."""

    def wrap(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = own(*args, **kwargs)
            if state.depth and not state.observing and not kwargs.get("generator"):
                if not torch.is_grad_enabled():
                    models.random_in[("noise", user_line())] = None
                elif is_normal and isinstance(out, torch.Tensor):
                    models.noise[address(out)] = user_line()
            return out

        return draw

    return wrap


def _seed(generator: str) -> Callable[[Callable], Callable]:
    """Log which line of the script seeds a generator, with which number."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            value = next(iter((*args, *kwargs.values())), None)
            if isinstance(value, int) and trail.user_calls_library():
                note("seed", generator=generator, value=value % (1 << 53), at=user_line())
            return own(*args, **kwargs)

        return seed

    return wrap


def _noise(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Log which noise a line of the script draws for a batch, after the first update."""

    def drawn(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = own(*args, **kwargs)
        in_step = trail.step and not state.observing and not state.loading and torch.is_grad_enabled()
        is_batch = out.dim() > 0 and Seen.noise < MOST_NOISE and not kwargs.get("generator")
        if in_step and is_batch and trail.user_calls_library():
            Seen.noise += 1
            note("noise", samples=len(out), values=fingerprint(out), at=user_line())
        return out

    return drawn


def _fetch(own: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(fetcher: Any, indices: Any) -> Any:
        if Seen.pid != os.getpid():  # a forked worker
            Seen.pid, Seen.fetches = os.getpid(), 0
        if Seen.fetches >= FETCHES:
            return own(fetcher, indices)
        Seen.fetches += 1
        generators = dict(_global_generators()) | dict(_generators_in(fetcher.dataset))
        before = {name: _state_of(generator) for name, generator in generators.items()}
        batch = own(fetcher, indices)
        used = {name: before[name] for name, generator in generators.items() if _state_of(generator) != before[name]}
        worker = data.get_worker_info()
        note(
            "fetch",
            worker=None if worker is None else worker.id,
            count=Seen.fetches,
            used=used,
            dataset=type(fetcher.dataset).__name__,
        )
        return batch

    return fetch


def _global_generators() -> Iterator[tuple[str, Any]]:
    yield "torch", torch.default_generator
    yield "random", random._inst
    if "numpy" in sys.modules:
        yield "numpy", sys.modules["numpy"].random.mtrand._rand


def _generators_in(thing: object, depth: int = 3, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the random generators that a data set keeps in its attributes."""
    if isinstance(thing, torch.Generator | random.Random) or type(thing).__name__ in ("Generator", "RandomState"):
        yield path, thing
    elif depth and hasattr(thing, "__dict__"):
        for name, value in list(vars(thing).items()):
            yield from _generators_in(value, depth - 1, f"{path}.{name}")


def _state_of(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return state_fingerprint(generator.get_state())
    if isinstance(generator, random.Random):
        return zlib.crc32(repr(generator.getstate()).encode())
    numpy_state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()
    return zlib.crc32(repr(numpy_state).encode())
