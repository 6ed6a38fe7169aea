"""Checkpoints: what is in those that the script saves, and which it loads again."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.profiler.profiler as profilers

from .. import overlay
from ..standin import placed
from ..trail import note, trail, user_line
from . import states
from .common import CONFIG, address, has_memory, local, optimizers, patch, quietly, sums
from .models import models


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
            where = args[0] if args else kwargs.get("map_location")
            at = user_line()
            path = redirection.to_read(f) if redirection and isinstance(f, str | os.PathLike) else f
            thing = own(path, *args, **kwargs)
            note("load", file=name_of(f), at=at, located=where is not None)
            remember(thing, at, str(where))
            return thing

        return load

    def exporting(own: Callable[..., Any]) -> Callable[..., Any]:
        def export(profiler: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if redirection:
                redirection.note_write(path, "save")
                path = redirection.to_write(path, keep=False)
            return own(profiler, path, *args, **kwargs)

        return export

    for kind in (profilers._KinetoProfile, torch.autograd.profiler.profile):
        patch(kind, "export_chrome_trace", exporting)
    patch(torch, "save", saving, torch.serialization)
    patch(torch, "load", loading, torch.serialization)


@quietly
def remember(thing: Any, at: str, where: str) -> None:
    """Remember the tensors of a loaded file, to see later whether the script keeps them beside the model."""
    tensors = [v for v in _tensors_in(thing) if v.numel() > 1 and v.dtype != torch.uint8]  # no random states
    if tensors:
        # tensors on the CPU with the stand-in, so it is asked where the script wanted them
        Loaded.now.append((at, where, trail.step, [weakref.ref(t) for t in tensors]))


def _tensors_in(thing: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif depth and isinstance(thing, dict | list | tuple):
        for value in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors_in(value, depth - 1)


class Loaded:
    """The files that were loaded."""

    now: ClassVar[list[tuple[str, str, int, list[Any]]]] = []


def look_at_loaded() -> None:
    """Log, two updates after a file was loaded, how much of it is still in memory beside weights and states."""
    ripe = [one for one in Loaded.now if trail.step >= one[2] + 2]
    if not ripe:
        return
    Loaded.now = [one for one in Loaded.now if one not in ripe]
    if any(ref() is not None for _, _, _, tensors in ripe for ref in tensors):
        gc.collect()
    ours = [t for model in models.known for t in (*model.parameters(), *model.buffers())]
    ours += [
        p for known in optimizers.known.values() if (one := known()) for g in one.param_groups for p in g["params"]
    ]
    ours += [t for known in optimizers.known.values() if (one := known()) for t in _tensors_in(dict(one.state))]
    places = {address(local(t)) for t in ours}
    weights = sum(local(p).nbytes for model in models.known for p in model.parameters())
    for at, where, _, tensors in ripe:
        alive = [t for ref in tensors if (t := ref()) is not None and address(t) not in places]
        note("kept", at=at, where=where, size=sum(t.nbytes for t in alive), beside=weights)


def name_of(file: Any) -> str | None:
    """Return the path that the script means by a file, if it has one."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if not isinstance(path, str | os.PathLike):
        return None
    return os.path.abspath(path).removeprefix(f"{CONFIG.scratch}/files")


MOST_WEIGHTS = 600


def note_weights(at: str) -> None:
    """Log the weights that are saved: if no update follows, the resumed run alone goes on from them."""
    for number, known in optimizers.known.items():
        if (optimizer := known()) is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if has_memory(p)][
                :MOST_WEIGHTS
            ]
            note(
                "saved_weights",
                at=at,
                optimizer=number,
                weights={models.names.get(id(p), f"?{i}"): sums(p) for i, p in enumerate(parameters)},
                state=len(getattr(optimizer, "optim", optimizer).state),
            )


@quietly
def note_save(thing: Any, file: Any, at: str) -> None:
    """Log what a checkpoint holds."""
    dicts = [thing] if isinstance(thing, dict) else []
    dicts += _inner_dicts(thing)
    tensors = {k: v for d in dicts for k, v in d.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
    whole = {
        name: p.numel() for model in models.known for name, p in model.named_parameters() if hasattr(p, "to_local")
    }
    for one in dicts:
        states.look_at(one, at, "save")
    shards = [name for name, v in tensors.items() if hasattr(v, "to_local") or v.numel() < whole.get(name, 0)]
    optimizers.saved = True
    if optimizers.weights_noted != trail.step:
        optimizers.weights_noted = trail.step
        note_weights(at)
    note(
        "save",
        file=name_of(file),
        at=at,
        tensors=len(tensors),
        shards=len(shards),
        wrapped=sum(name.startswith("module.") for name in tensors),
        # random states are bytes on the CPU
        on_gpu=_on_gpu([t for t in tensors.values() if t.dtype != torch.uint8]),
    )


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors are on a GPU; with the stand-in, whether they would be, as far as is known."""
    if CONFIG.standin:
        return bool(tensors) and placed.on_gpu and not placed.to_cpu
    return any(tensor.is_cuda for tensor in tensors)


def _inner_dicts(thing: Any, depth: int = 3) -> Iterator[dict]:
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    for value in values:
        if isinstance(value, dict):
            yield value
        if depth:
            yield from _inner_dicts(value, depth - 1)
