"""Updates: gradients and weights before them, learning rates, clipping, schedules; the end of the run."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..settings import AFTER_A_SAVE
from ..trail import note, trail, user_line
from . import files, mappings, passes, statistics, totals
from .backward import gradient_norm, gradient_size
from .common import CONFIG, has_memory, local, optimizers, patch, quietly, state, sums
from .model import kept_buffers, name_parameters, note_sharded
from .models import models

MOST_PARAMETERS = 600
FIRST = 16 if CONFIG.batches else 200
"""first updates of an optimizer that are logged with all sums; of the others, every tenth, and those after a save"""
SETTLED = 2
"""updates after which all sharded weights have had a gradient"""
LOW_PRECISION = (torch.bfloat16, torch.float16)


def install() -> None:
    """Observe all optimizers, clipping, the scaler, and schedulers."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if hasattr(nn.utils, name):
            patch(nn.utils, name, _clip, nn.utils.clip_grad)
    patch(torch.amp.GradScaler, "scale", _scaling(True))
    patch(torch.amp.GradScaler, "unscale_", _scaling(False))
    patch(Optimizer, "__init__", _optimizer_init)
    patch(Optimizer, "load_state_dict", _loading)
    patch(torch.amp.autocast_mode.autocast, "__enter__", _autocast)
    for kind in (LRScheduler, ReduceLROnPlateau):
        patch(kind, "__init__", _scheduler_init)
        patch(kind, "step", _scheduler_step)


def number_of(optimizer: Optimizer) -> int:
    """Return the number of an optimizer: how many had made an update before it."""
    for number, known in optimizers.known.items():
        if known() is optimizer:
            return number
    optimizers.known[len(optimizers.known)] = weakref.ref(optimizer)
    return len(optimizers.known) - 1


def only_makes_state() -> bool:
    """Return whether torch makes this step, with gradients of zero, so that there is a state to load into."""
    frame = sys._getframe(2)
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == "_init_optim_state":  # of torch.distributed.checkpoint.state_dict
            return True
    return False


def _loading(own: Callable[..., None]) -> Callable[..., None]:
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        note("optimizer_loaded", at=user_line())
        own(self, *args, **kwargs)

    return load_state_dict


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    optimizers.depth += 1
    if optimizers.depth > 1 or only_makes_state():
        return
    if not optimizers.known:
        mappings.at_first_update()
    if state.world > 1:
        statistics.look(trail.step)
    note_before(optimizer, bool(args[1:]) or any(kwargs.values()))


@quietly
def note_before(optimizer: Optimizer, closure: bool) -> None:
    """Log gradients, weights and learning rates before an update: the first ones, every tenth, and after a save."""
    number = number_of(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizers.held |= {id(p) for p in parameters}
    if any(id(p) not in models.names for p in parameters):
        name_parameters()
    count = optimizers.updates[number] = optimizers.updates.get(number, -1) + 1
    optimizers.became = passes.at_step(number, optimizer)
    if trail.step == SETTLED:
        note_sharded()  # a run that hangs has no end
    reduced, optimizers.reduced = optimizers.reduced, 0.0
    saved, optimizers.saved = optimizers.saved, False
    optimizers.went_on |= saved
    if count >= FIRST and count % 10 != 9 and not saved:
        return
    named = [(models.names.get(id(p), f"?{i}"), p) for i, p in enumerate(parameters[:MOST_PARAMETERS])]
    optimizers.sharded |= any(hasattr(p, "device_mesh") for p in parameters)
    note(
        "gradients",
        optimizer=number,
        count=count,
        made=optimizer.__dict__.get("_rankdoctor_made", "") if count == 0 else "",
        at=user_line(),
        closure=closure,
        made_lr=optimizer.__dict__.get("_rankdoctor_rates", []) if count == 0 else [],
        gradients={name: None if p.grad is None else sums(p.grad) for name, p in named if p.requires_grad},
        weights={name: sums(p) for name, p in named if has_memory(p)},
        unsharded=[name for name, p in named if p.requires_grad and not hasattr(p, "device_mesh")]
        if optimizers.sharded
        else [],
        lr=[float(group["lr"]) for group in optimizer.param_groups],
        state=len(getattr(optimizer, "optim", optimizer).state),  # ZeroRedundancyOptimizer has another one inside
        scaler=None if optimizers.scaler is None else optimizers.scaler.state_dict(),
        dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        factor=_common_factor(optimizer, number),
        others=_weights_of_others(),
        kept_buffers=kept_buffers(),
        kept=size_of_all(parameters) / reduced if reduced else None,
    )
    low = [p for p in parameters if has_memory(p) and p.dtype in LOW_PRECISION and p.grad is not None][:8]
    optimizers.copies = [(p, local(p).flatten()[:4096].clone()) for p in low]


def size_of_all(parameters: list[torch.Tensor]) -> float:
    """Return the sum of the absolute values of all gradients."""
    return sum(float(local(p.grad).double().abs().sum()) for p in parameters if p.grad is not None)


def _common_factor(optimizer: Optimizer, number: int) -> float | None:
    """Return by what the script has multiplied the gradients since backward; None if not all by the same number."""
    size, norm = models.sizes.get(number), models.norms.get(number)
    if not size or not norm:
        return None
    factor = gradient_size(optimizer) / size
    return factor if abs(gradient_norm(optimizer) / norm - factor) <= 1e-3 * factor else None


def _weights_of_others() -> dict[int, list[float]]:
    """Return the sum of the weights, and of their absolute values, of each model of which no weight is trained."""
    found = {}
    for number, model in enumerate(models.known):
        parts = [] if any(id(p) in optimizers.held for p in model.parameters()) else [*map(sums, model.parameters())]
        if parts and all(parts):
            found[number] = [sum(part[k] for part in parts if part) for k in (0, 1)]
    return found


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    optimizers.depth = max(0, optimizers.depth - 1)
    if optimizers.depth == 0 and not only_makes_state():
        note_after(optimizer)
        count_step()


def count_step() -> None:
    """Count an update, and end the run after as many as it should make."""
    trail.step += 1
    if 0 < CONFIG.stop_after <= trail.step or (CONFIG.stop_after == AFTER_A_SAVE and optimizers.went_on):
        wait_for_the_end("stopped")
    if trail.step >= CONFIG.steps:
        wait_for_the_end("enough")


@quietly
def note_after(optimizer: Optimizer) -> None:
    """Log an update, and what led to it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    alive = [at for token, at in models.graphs if token() is not None]
    what: dict[str, object] = {}
    if optimizers.copies:
        changes = [
            (local(p).flatten()[:4096] == before, local(p.grad).flatten()[:4096] != 0)
            for p, before in optimizers.copies
            if p.grad is not None
        ]
        what = {
            "low_same": sum(int((same & moved).sum()) for same, moved in changes),
            "low_all": sum(int(moved.sum()) for _, moved in changes),
        }
    note(
        "update",
        optimizer=number_of(optimizer),
        at=user_line(),
        parameters=len(parameters),
        foreign=sum(id(p) not in models.names for p in parameters),
        backwards=models.backwards,
        losses=models.losses,
        of_terms=models.of_terms,
        added=number_of(optimizer) in models.added - models.zeroed,
        factors=models.factors,
        elements=models.elements[:50],
        waits=optimizers.waits,
        graphs=len(alive),
        graph_at=alive[0] if alive else None,
        **optimizers.became,
        **what,
    )
    optimizers.became = {}
    totals.at_end_of_step(state.world)
    files.look_at_loaded()
    models.graphs = [pair for pair in models.graphs if pair[0]() is not None]
    models.backwards, models.losses, models.factors, models.elements, models.of_terms = [], [], [], [], []
    optimizers.waits, optimizers.copies = {}, []
    optimizers.scaled = False
    models.zeroed.discard(number_of(optimizer))
    models.added.discard(number_of(optimizer))


def wait_for_the_end(how: str) -> None:
    """Let the doctor end all ranks, when each of them has come here: none is missed by the others in a collective."""
    state.finish(how)
    with open(f"{CONFIG.logs}/{os.getpid()}.waits", "w") as mark:
        mark.write(how)
    while True:
        time.sleep(1)


def _clip(own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = own(tensors, *args, **kwargs)
        note(
            "clip",
            at=user_line(),
            scaled=optimizers.scaled,
            plain=not any(hasattr(t, "to_local") for t in tensors),
            of_no_model=not any(id(t) in models.names for t in tensors),
            passes=len(models.backwards),
        )
        return norm

    return clip


def _scaling(scaled: bool) -> Callable[[Callable], Callable]:
    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def scaling(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                optimizers.scaled, optimizers.scaler = scaled, scaler
            return own(scaler, *args, **kwargs)

        return scaling

    return wrap


class Half:
    """Whether autocast in float16 was noted."""

    noted = False


def _autocast(own: Callable[..., Any]) -> Callable[..., Any]:
    def enter(context: Any) -> Any:
        # The stand-in computes in bf16 what the script wanted in fp16.
        half = context.__dict__.get("_rankdoctor_half", context.fast_dtype == torch.float16 and context._enabled)
        if half and not Half.noted and torch.is_grad_enabled():
            Half.noted = True
            note("half", at=user_line())
        return own(context)

    return enter


def _scheduler_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if not any(known is scheduler for known, _ in optimizers.schedulers):
            optimizers.schedulers.append((scheduler, user_line()))
        own(scheduler, *args, **kwargs)

    return init


def _optimizer_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        optimizer.__dict__["_rankdoctor_made"] = user_line()
        own(optimizer, *args, **kwargs)
        optimizer.__dict__["_rankdoctor_rates"] = [
            float(group["lr"]) for group in optimizer.param_groups if "lr" in group
        ]

    return init


def _scheduler_step(own: Callable[..., None]) -> Callable[..., None]:
    def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        optimizers.schedule_lines[id(scheduler)] = user_line()
        if isinstance(scheduler, ReduceLROnPlateau) and (args or "metrics" in kwargs):
            note_metric(scheduler, args[0] if args else kwargs["metrics"])
        own(scheduler, *args, **kwargs)

    return step


@quietly
def note_metric(scheduler: Any, value: Any) -> None:
    """Log the value that a schedule goes by."""
    note("metric", cls=type(scheduler).__name__, value=float(value), at=user_line())


def length_of(scheduler: Any) -> int | None:
    """Return for how many of its steps a schedule is made; None if it does not say."""
    for name in ("total_steps", "T_max"):
        if isinstance(getattr(scheduler, name, None), int):
            return getattr(scheduler, name)
    functions = getattr(scheduler, "lr_lambdas", None)
    if not functions:
        return None
    upto = 8 * max(scheduler.last_epoch, 50)
    values = [float(functions[0](step)) for step in range(upto)]
    lowest = min(range(1, upto), key=lambda step: round(values[step], 6))
    return lowest if values[lowest] < 0.5 * max(values) and lowest < upto - 1 else None


def finish() -> None:
    """Log the schedules."""
    for scheduler, at in optimizers.schedulers:
        try:
            length = length_of(scheduler)
        except Exception:  # a schedule of the script's own, asked for a step that it does not know
            length = None
        note(
            "schedule",
            cls=type(scheduler).__name__,
            at=at,
            steps=getattr(scheduler, "last_epoch", 0),
            length=length,
            stepped_at=optimizers.schedule_lines.get(id(scheduler), at),
        )
