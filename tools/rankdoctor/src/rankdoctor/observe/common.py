"""What all observers share: where the process is, patching a function, and computing without being observed."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import functools
import traceback
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from .. import settings
from ..trail import note

CONFIG = settings.load()


class State:
    """Where this process is."""

    def __init__(self) -> None:
        self.depth = 0
        """models that are being called"""
        self.in_backward = self.observing = self.loading = self.ended = False
        self.world = 1
        """ranks that this process has joined"""
        self.loader: str | None = None
        """the loader that gave the last batch"""
        self.training = False
        """whether the last call of a model was one of training"""
        self.finish: Callable[[str], None] = lambda _: None

    def forget(self) -> None:
        """In a forked process: a worker of a loader is in no call of a model."""
        self.depth, self.in_backward, self.observing = 0, False, False


state = State()


@dataclass
class Optimizers:
    """The optimizers of this process."""

    known: dict[int, "weakref.ref[Optimizer]"] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    """ids of the parameters in all of them"""
    updates: dict[int, int] = field(default_factory=dict)
    depth: int = 0
    """steps that are being taken: one optimizer can call another one"""
    scaled: bool = False
    """whether the gradients are multiplied by the factor of a GradScaler"""
    scaler: Any = None
    """the GradScaler that was used last"""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """weights in 16 bits, and their values before the update"""
    waits: dict[str, int] = field(default_factory=dict)
    """operations since the last update that make the CPU wait for a GPU, with their lines"""
    became: dict[str, object] = field(default_factory=dict)
    """what became of the backward passes since the last update"""
    reduced: float = 0.0
    """size of the gradients that the script has added up over the ranks itself since the last update"""
    sharded: bool = False
    """whether some optimizer that has made an update has sharded weights"""
    saved: bool = False
    """whether a checkpoint was saved since the last update"""
    weights_noted: int = -1
    """number of updates after which the weights were logged, because they were saved"""
    went_on: bool = False
    """whether an update was made after a checkpoint was saved"""
    schedulers: list[tuple[Any, str]] = field(default_factory=list)
    schedule_lines: dict[int, str] = field(default_factory=dict)
    """by the ids of schedulers: the line of the last step"""


optimizers = Optimizers()


def patch(target: Any, name: str, wrap: Callable[[Callable], Callable], *others: Any) -> None:
    """Replace ``target.name``, and the same name in ``others``, by ``wrap(original)``."""
    original = getattr(target, name)
    new = functools.wraps(original)(wrap(original))
    for place in (target, *others):
        setattr(place, name, new)


def in_transform() -> bool:
    """Return whether torch.func transforms what is being called, such as vmap: its tensors have no memory to read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` without observing it; log its errors instead of raising them in the script."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if state.observing or torch._C._get_tracing_state() is not None:  # torch.jit.trace would record it
            return None
        state.observing = True
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return function(*args, **kwargs)
        except Exception:
            note("doctor_failed", text=traceback.format_exc(limit=-3))
        finally:
            state.observing = False

    return wrapped


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor; an unsharded tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def address(tensor: torch.Tensor) -> int:
    """Return where the values of a tensor are in memory, or 0 if they are in no single place, as of a sparse one."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the numbers of this tensor can be read: FSDP frees the memory of weights that it has gathered."""
    part = local(tensor)
    return part.numel() == 0 or part.is_meta or part.is_sparse or part.untyped_storage().size() > 0


def sums(tensor: torch.Tensor) -> list[float] | None:
    """Return the sum of the values of this rank's shard, the sum of their absolute values, and their norm.

    A cross-entropy leaves the sum of the last bias as it is, and if that has one sign, the absolute sum, too.
    """
    part = local(tensor.detach())
    if part.is_meta:
        return None
    part = part.coalesce().values() if part.is_sparse else part
    values = part.double()
    return [float(values.sum()), float(values.abs().sum()), float(values.square().sum().sqrt())]


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a hash of the values."""
    return fingerprints(local(tensor.detach()).reshape(1, -1))[0]


def state_fingerprint(generator_state: torch.Tensor) -> int:
    """Return a hash of the whole state of a random generator: a few draws change some of its last bytes only."""
    return zlib.crc32(generator_state.cpu().numpy().tobytes())


def fingerprints(rows: torch.Tensor, most_values: int = 4096) -> list[int]:
    """Return a hash of each row of (N, ...) values; of long rows, only evenly spaced values are hashed."""
    flat = rows.detach().reshape(len(rows), -1)
    flat = flat[:, :: 1 + flat.shape[1] // most_values].contiguous()
    values = flat.view(torch.uint8).long() + 1
    position = torch.arange(1, values.shape[1] + 1, device=values.device)
    return (values * mixed(position)).sum(1).tolist()


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each whole number, in integers that wrap around, so the order of a sum does not matter."""
    numbers = numbers * 0x9E3779B97F4A7C1
    return (numbers ^ (numbers >> 29)) * 0xBF58476D1CE4E5B


LEAST_IN_BAG = 16
"""numbers in a sample that can be known by them in any order"""


def bags(rows: torch.Tensor, most_values: int = 65_536) -> list[int]:
    """Return a hash of the values of each row of (N, ...) in any order: flips, rolls and turned images keep it.

    An empty list: the rows are too long, or hold whole numbers, such as tokens, whose order makes the sample.
    """
    flat = rows.detach().reshape(len(rows), -1)
    if not flat.is_floating_point() or not LEAST_IN_BAG <= flat.shape[1] <= most_values:
        return []
    values = (flat.float() + 0.0).contiguous().view(torch.int32).long()  # -0.0 becomes 0.0
    values = mixed(values ^ (values >> 13))
    return (values ^ (values >> 17)).sum(1).tolist()
