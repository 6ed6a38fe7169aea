"""Checkpoints: what is in those that the script saves, and which it loads again."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .. import overlay
from ..standin import placed
from ..trail import note, user_line
from .common import CONFIG, patch, quietly
from .model import models


def install() -> None:
    """Observe `torch.save` and `torch.load`, which open files in C++; let them follow the redirection."""
    redirection = overlay.Overlay(CONFIG.scratch) if CONFIG.redirect else None

    def saving(own: Callable[..., None]) -> Callable[..., None]:
        def save(thing: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            note_save(thing, f, user_line())
            if redirection and isinstance(f, str | os.PathLike):
                redirection.note_write(f, "save")
                target = redirection.to_write(f, keep=False)
                own(thing, target, *args, **kwargs)
                return redirection.unmark(f)
            return own(thing, f, *args, **kwargs)

        return save

    def loading(own: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            located = bool(args) or kwargs.get("map_location") is not None
            note("load", file=name_of(f), at=user_line(), located=located)
            path = redirection.to_read(f) if redirection and isinstance(f, str | os.PathLike) else f
            return own(path, *args, **kwargs)

        return load

    patch(torch, "save", saving, torch.serialization)
    patch(torch, "load", loading, torch.serialization)


def name_of(file: Any) -> str | None:
    """Return the path that the script means by a file, if it has one."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if not isinstance(path, str | os.PathLike):
        return None
    return os.path.abspath(path).removeprefix(f"{CONFIG.scratch}/files")


@quietly
def note_save(thing: Any, file: Any, at: str) -> None:
    """Log what a checkpoint holds."""
    dicts = [thing] if isinstance(thing, dict) else []
    dicts += _inner_dicts(thing)
    tensors = {k: v for d in dicts for k, v in d.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
    whole = {
        name: p.numel() for model in models.known for name, p in model.named_parameters() if hasattr(p, "to_local")
    }
    shards = [name for name, v in tensors.items() if hasattr(v, "to_local") or v.numel() < whole.get(name, 0)]
    note(
        "save",
        file=name_of(file),
        at=at,
        tensors=len(tensors),
        shards=len(shards),
        wrapped=sum(name.startswith("module.") for name in tensors),
        on_gpu=bool(tensors) and _on_gpu(tensors.values()),
    )


def _on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are on a GPU; with the stand-in, whether they would be, as far as is known."""
    if CONFIG.standin:
        return placed.on_gpu and not placed.to_cpu
    return any(tensor.is_cuda for tensor in tensors)


def _inner_dicts(thing: Any, depth: int = 3) -> Iterator[dict]:
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    for value in values:
        if isinstance(value, dict):
            yield value
        if depth:
            yield from _inner_dicts(value, depth - 1)
