"""Which outputs of a model move when one sample, or one token, of its input changes.

`influence` answers this for any module, in anybody's tests; `questions.py` asks with it what a training script needs.

    found = influence(model, tokens)                    # integers (N, T)
    assert not found.future and not found.mixed
    assert not influence(model, tokens, {"attention_mask": mask}).from_padding(mask)
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""difference, relative to the largest output, up to which rounding can be the reason"""
AWAKE = 0.05
"""standard deviation of the noise that replaces parameters which are all zero"""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass
class Influence:
    """What moved when the input changed. N is the number of samples, T the number of positions (tokens)."""

    size: int
    """N"""
    length: int | None
    """T; None if the input has no positions"""
    random: bool
    """whether two calls with the same input, one after the other, gave different outputs"""
    repeatable: bool
    """whether the same input and the same random state give the same outputs; if not, nothing else is judged"""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """for each sample that was changed: the samples whose outputs moved"""
    positions: dict[int, Tensor] = field(default_factory=dict)
    """for each position that was changed (in all samples): which outputs of a sample moved, (N, T) booleans"""
    unclear: dict[int, Tensor] = field(default_factory=dict)
    """the same for outputs (N, T): a value for each position, or, by chance, as many values for the whole sample"""
    whole: dict[int, Tensor] = field(default_factory=dict)
    """the same for outputs without positions: (N,) booleans"""

    @property
    def mixed(self) -> list[tuple[int, int]]:
        """Pairs (i, j) of samples: changing sample i moves the output of another sample j."""
        return [(i, j) for i, moved in self.samples.items() for j in moved if i != j]

    @property
    def future(self) -> list[tuple[int, int]]:
        """Pairs (t, s) of positions: changing token t moves the output at an earlier position s."""
        return [(t, s) for t, moved in self.positions.items() for s in true_ones(moved.any(0)[:t])]

    def across(self, documents: Tensor) -> list[tuple[int, int, int]]:
        """Triples (n, t, s): in sample n, changing token t moves the output at s, in another document.

        ``documents`` has the number of the document of each token, (N, T).
        """
        pairs = []
        for t, moved in self.positions.items():
            other = moved & (documents != documents[:, t : t + 1])
            pairs += [(n, t, s) for n, s in other.nonzero().tolist()]
        return pairs

    def from_padding(self, real: Tensor) -> list[tuple[int, int, int | None]]:
        """Triples (n, t, s): in sample n, changing padding at t moves the output at s, which is a real token.

        ``real`` is true where there is no padding, (N, T). s is None for an output without positions.
        """
        real = real.bool()
        pairs: list[tuple[int, int, int | None]] = []
        for of_outputs in (self.positions, self.unclear):
            for t, moved in of_outputs.items():
                pairs += [(n, t, s) for n, s in (moved & real & ~real[:, t : t + 1]).nonzero().tolist()]
        for t, outputs in self.whole.items():
            pairs += [(n, t, None) for n in true_ones(outputs & ~real[:, t] & real.any(1))]
        return pairs

    @property
    def mixes_positions(self) -> bool:
        """Whether any output depends on a token at another position: if not, a mask has nothing to hide."""
        return any(s != t for t, moved in self.positions.items() for s in true_ones(moved.any(0)))


def true_ones(values: Tensor) -> list[int]:
    """Return where a vector of booleans is true."""
    return values.nonzero().flatten().tolist()


def influence(
    model: nn.Module,
    args: Any,  # noqa: ANN401
    kwargs: Mapping[str, Any] | None = None,
    *,
    samples: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    tokens: Tensor | None = None,
    batch_dim: int = 0,
) -> Influence:
    """Call ``model(*args, **kwargs)`` with one sample, then one token, changed at a time; return what moves.

    ``args`` is a tuple, or the only argument. The model is in evaluation mode during the calls; its modes, and the
    state of the random generators, are restored. Parameters that are all zero have noise during the calls, because
    nothing passes through a layer that starts at zero. ``samples`` and ``positions`` name what is changed (default: up
    to 8 samples, and up to 64 evenly spaced positions). ``tokens`` is the input whose positions are changed, (N, T)
    integers or (N, T, D) floats; without it, the first input of such a shape.
    """
    args = args if isinstance(args, tuple) else (args,)
    with Probe(model, args, dict(kwargs or {}), tokens, batch_dim) as probe:
        found = Influence(probe.size, probe.length, probe.random, probe.repeatable)
        if not found.repeatable:
            return found
        for i in range(min(probe.size, 8)) if samples is None else samples:
            found.samples[i] = true_ones(probe.moved_samples(i))
        for t in evenly(probe.length or 0, 64) if positions is None else positions:
            found.positions[t], found.unclear[t], found.whole[t] = probe.moved_positions(t)
    return found


def evenly(length: int, most: int) -> list[int]:
    """Return up to ``most`` evenly spaced positions, the first and the last among them."""
    return sorted({round(k * (length - 1) / max(1, min(most, length) - 1)) for k in range(min(most, length))})


class Probe:
    """A model with a batch: it is called with changed inputs, and its outputs are compared with the usual ones."""

    def __init__(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], tokens: Tensor | None = None, batch_dim: int = 0
    ) -> None:
        self.model, self.batch_dim = model, batch_dim
        self.leaves, self.form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim() > batch_dim]
        if not tensors:
            raise ValueError("no argument of the model is a tensor with samples")
        chosen = tokens if tokens is not None else next(filter(has_positions, tensors), None)
        self.tokens = chosen
        first = chosen if chosen is not None else tensors[0]
        self.size = first.shape[batch_dim]
        self.length = chosen.shape[1 - batch_dim] if chosen is not None else None
        self.stack = contextlib.ExitStack()
        self.base: list[Tensor] = []
        self.fixed: set[int] = set()
        """ids of the outputs that have as many parts for fewer samples: counts of classes, for example"""
        self.random = False
        self.repeatable = True

    def __enter__(self) -> "Probe":
        """Call the model with the unchanged inputs, three times: as it goes on, and from one random state."""
        self.stack.enter_context(torch.no_grad())
        self.stack.enter_context(evaluating(self.model))
        self.stack.enter_context(awake(self.model))
        self.state = random_state()
        self.stack.callback(restore_random, self.state)
        try:
            self.base = self.call(self.leaves)
            following = self.call(self.leaves, restore=False)
            again = self.call(self.leaves)
            self.fixed = self.independent_of_size()
        except BaseException:
            self.stack.close()
            raise
        self.random = any(bool(moved(a, b).any()) for a, b in zip(self.base, following, strict=True))
        self.repeatable = not any(bool(moved(a, b).any()) for a, b in zip(self.base, again, strict=True))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the modes, the parameters and the random state."""
        self.stack.close()

    def call(self, leaves: list[Any], restore: bool = True) -> list[Tensor]:
        """Return the outputs for these inputs, computed from the first random state, or from the present one."""
        if restore:
            restore_random(self.state)
        args, kwargs = tree_unflatten([own(leaf) for leaf in leaves], self.form)
        return list(tensors_in(self.model(*args, **kwargs)))

    def has_samples(self, leaf: object) -> bool:
        """Return whether an input has one part for each sample, and is no mask or list of positions for all."""
        if not isinstance(leaf, Tensor) or leaf.dim() <= self.batch_dim or leaf.shape[self.batch_dim] != self.size:
            return False
        shared = self.size == self.length and leaf is not self.tokens and leaf.shape in ((self.size,), (self.size,) * 2)
        return not shared

    def sample_changed(self, i: int) -> list[Any]:
        """Return inputs in which sample i is another one of the batch; with one sample only, it is changed."""
        dim, other = self.batch_dim, (i + 1) % self.size
        changed = []
        for leaf in self.leaves:
            if self.has_samples(leaf):
                new = leaf.clone()
                part = leaf.select(dim, other)
                if torch.equal(part, leaf.select(dim, i)):
                    part = another(leaf).select(dim, i)
                new.select(dim, i).copy_(part)
                changed.append(new)
            else:
                changed.append(leaf)
        return changed

    def token_changed(self, t: int) -> list[Any]:
        """Return inputs in which, in all samples, the token at position t is another one."""
        assert self.tokens is not None
        new = self.tokens.clone()
        new.select(1 - self.batch_dim, t).copy_(another(self.tokens).select(1 - self.batch_dim, t))
        return [new if leaf is self.tokens else leaf for leaf in self.leaves]

    def moved_samples(self, i: int) -> Tensor:
        """Return which samples' outputs move if sample i changes, (N,) booleans."""
        found = torch.zeros(self.size, dtype=torch.bool)
        for before, after in zip(self.base, self.call(self.sample_changed(i)), strict=True):
            if self.is_of_samples(before):
                different = moved(before, after).transpose(0, self.batch_dim)
                if different.dim() > 1 and different.shape[1] == self.size:  # such as similarities of all pairs
                    different = different.clone()
                    different[torch.arange(self.size) != i, i] = False
                found |= different.reshape(self.size, -1).any(1).cpu()
        return found

    def independent_of_size(self) -> set[int]:
        """Return the ids of the outputs whose shape stays if a sample is left out; none if the model refuses that."""
        shorter = [
            leaf.narrow(self.batch_dim, 0, self.size - 1) if self.has_samples(leaf) else leaf for leaf in self.leaves
        ]
        try:
            outputs = self.call(shorter) if self.size > 1 else []
        except Exception:
            return set()
        if len(outputs) != len(self.base):
            return set()
        return {id(base) for base, output in zip(self.base, outputs, strict=True) if base.shape == output.shape}

    def is_of_samples(self, output: Tensor) -> bool:
        """Return whether an output has one part for each sample."""
        has_parts = output.dim() > self.batch_dim and output.shape[self.batch_dim] == self.size
        return has_parts and id(output) not in self.fixed

    def is_of_positions(self, output: Tensor) -> bool:
        """Return whether an output has one vector for each position of each sample."""
        return output.dim() == 3 and self.tokens is not None and output.shape[:2] == self.tokens.shape[:2]

    def moved_positions(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return which outputs move if token t changes.

        These are (N, T) booleans for outputs with a vector for each position, the same for outputs (N, T), and (N,) for
        outputs without positions.
        """
        assert self.length is not None
        positions, unclear = torch.zeros(2, self.size, self.length, dtype=torch.bool)
        whole = torch.zeros(self.size, dtype=torch.bool)
        for before, after in zip(self.base, self.call(self.token_changed(t)), strict=True):
            if self.is_of_positions(before):
                different = moved(before, after).any(-1).cpu()
                positions |= different if self.batch_dim == 0 else different.T
            elif self.tokens is not None and before.shape == self.tokens.shape[:2]:
                different = moved(before, after).cpu()
                unclear |= different if self.batch_dim == 0 else different.T
            elif self.is_of_samples(before) and before.dim() == 2:
                whole |= moved(before, after).transpose(0, self.batch_dim).reshape(self.size, -1).any(1).cpu()
        return positions, unclear, whole

    def first_module(self, changed: list[Any], is_wrong: Callable[[Tensor], bool]) -> str:
        """Return the name of the innermost module whose output first moves where it must not; "" if none does.

        ``is_wrong`` gets, for an output of a module, the booleans of what moved.
        """
        outputs: dict[str, list[list[Tensor]]] = {}
        hooks = [
            module.register_forward_hook(
                lambda _, __, output, name=name: outputs.setdefault(name, []).append([*tensors_in(output)])
            )
            for name, module in self.model.named_modules()
            if name
        ]
        try:
            self.call(self.leaves)
            before, outputs = outputs, {}
            self.call(changed)
        finally:
            for hook in hooks:
                hook.remove()
        for name, calls in outputs.items():  # in the order in which they ended, so the innermost comes first
            for one, other in zip(before.get(name, []), calls, strict=False):
                for a, b in zip(one, other, strict=False):
                    if a.shape == b.shape and is_wrong(moved(a, b)):
                        return name
        return ""


def has_positions(tensor: Tensor) -> bool:
    """Return whether a tensor looks like tokens, (N, T) integers, or like their embeddings, (N, T, D) floats."""
    return (tensor.dim() == 2 and tensor.dtype in INTEGERS) or (tensor.dim() == 3 and tensor.is_floating_point())


def own(leaf: object) -> object:
    """Return an input that the model may overwrite."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def another(values: Tensor) -> Tensor:
    """Return other values of the same kind: the next token of the batch, or the values of another sample."""
    if values.dtype == torch.bool:
        return ~values
    if not values.is_floating_point():
        known = values.unique()
        if len(known) == 1:
            return torch.where(values > 0, values - 1, values + 1)
        return known[(torch.searchsorted(known, values) + 1) % len(known)]
    other = values.roll(1, 0)
    same = (other == values).all(-1) if values.dim() > 1 else other == values  # such as a token that is padding in both
    other[same] = 1 - values[same]
    return other


def moved(before: Tensor, after: Tensor) -> Tensor:
    """Return where two outputs differ by more than rounding."""
    if before.shape != after.shape:
        return torch.ones_like(before, dtype=torch.bool)
    if not before.is_floating_point():
        return before != after
    finite = before[before.isfinite()].double().abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    limit = scale * ROUNDING.get(least_precise(before), 1e-5)
    same = (before == after) | (before.isnan() & after.isnan())
    difference = (before.double() - after.double()).abs()
    return ~same & ~(difference <= limit)  # a difference that is not a number has moved


def least_precise(output: Tensor) -> torch.dtype:
    """Return the least precise type with which an output may have been computed."""
    kind = output.device.type
    used = [output.dtype] + ([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])
    return max(used, key=lambda dtype: ROUNDING.get(dtype, 0.0))


def tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module: in tuples, dictionaries, and simple objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        parts: Any = ()
        if isinstance(value, Mapping):
            parts = value.values()
        elif isinstance(value, list | tuple):
            parts = value
        elif hasattr(value, "__dataclass_fields__"):
            parts = vars(value).values()
        for part in parts:
            yield from tensors_in(part, depth - 1)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def awake(model: nn.Module) -> Iterator[None]:
    """Give parameters that are all zero some noise for a while, so that something passes through their layers."""
    asleep = [p for p in model.parameters() if p.is_floating_point() and not p.is_meta and not bool(p.any())]
    kept = [p.detach().clone() for p in asleep]
    generator = torch.Generator().manual_seed(0)
    try:
        for p in asleep:
            p.data.copy_(AWAKE * torch.randn(p.shape, generator=generator))
        yield
    finally:
        for p, value in zip(asleep, kept, strict=True):
            p.data.copy_(value)


def random_state() -> dict[str, Any]:
    """Return the states of the random generators that a model may use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Put the random generators back into these states."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
