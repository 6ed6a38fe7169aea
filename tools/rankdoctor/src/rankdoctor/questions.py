"""What the influences of samples and tokens say about a model and a batch of its training.

Four questions: does the model look into the future, do packed documents see each other, does padding count, do samples
see each other in evaluation? A question is answered only where the batch shows what is meant; otherwise the verdict
says why not.
"""

import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from .influence import ROUNDING, Probe, evenly, has_positions, least_precise, true_ones
from .verdicts import FAULT, FINE, NOTE, UNJUDGED, Verdict

MANY = 16
"""positions that are changed at most"""


def verdicts(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    targets: Sequence[Tensor] = (),
    *,
    causal: bool = False,
    end_of_text: int | None = None,
) -> list[Verdict]:
    """Return what the influences of samples and tokens say about a model and one of its batches.

    ``targets`` are those of its losses: they tell whether it predicts the next token, which ``causal`` says by itself.
    ``end_of_text`` is the token that ends each document of a packed sequence.
    """
    names = names_of(model, args, kwargs)
    tokens, predicted = tokens_of(names, targets)
    if causal and tokens is not None:
        predicted = torch.ones(tokens.shape[:2], dtype=torch.bool)
    try:
        probe = Probe(model, args, kwargs, tokens)
        with probe:
            if not probe.repeatable:
                text = "the model gives other outputs for the same batch and the same random state"
                return [Verdict("random", NOTE, text)] + [
                    Verdict(question, UNJUDGED, text) for question in ("samples", "future", "documents", "padding")
                ]
            text = "two evaluations of the same batch in evaluation mode"
            asked = [
                Verdict("random", NOTE, f"{text} give different outputs")
                if probe.random
                else Verdict("random", FINE, f"{text} are equal")
            ]
            asked.append(samples_verdict(probe, names))
            if asked[-1].answer == FAULT and probe.tokens is not None:
                reason = "the samples see each other, so the influence of one token is not known"
                return asked + [Verdict(question, UNJUDGED, reason) for question in ("future", "documents", "padding")]
            asked.append(future_verdict(probe, predicted))
            asked.append(documents_verdict(probe, names, end_of_text))
            asked.append(padding_verdict(probe, names))
            return asked
    except Exception as error:
        reason = f"a call of the model with this batch failed: {type(error).__name__}: {str(error)[:200]}"
        return [
            Verdict(question, UNJUDGED, reason) for question in ("random", "samples", "future", "documents", "padding")
        ]


def names_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments, by their names."""
    try:
        bound = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        bound = {f"argument {number}": value for number, value in enumerate(args)} | kwargs
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, Mapping):
            flat |= value
        elif isinstance(value, tuple | list):
            flat |= {f"{name} {number}": one for number, one in enumerate(value)}
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if isinstance(value, Tensor)}


def tokens_of(names: dict[str, Tensor], targets: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the input with the tokens, and where the targets are the next tokens, (N, T) booleans, or None."""
    inputs = [
        value for name, value in names.items() if has_positions(value) and not re.search(r"label|target|mask|pos", name)
    ]
    for one in inputs:
        for target in targets:
            if (predicted := next_tokens(target, one)) is not None:
                return one, predicted
    return next(iter(inputs), None), None


def next_tokens(target: Tensor, tokens: Tensor) -> Tensor | None:
    """Return where a target is the token that follows, (N, T); None if the targets are something else.

    Negative targets, such as -100, are not counted: a prefix may see all of itself.
    """
    if tokens.dim() != 2 or target.is_floating_point() or tokens.shape[1] < 4:
        return None
    size, length = tokens.shape
    if target.numel() == size * length:
        found = target.reshape(size, length)[:, :-1]
    elif target.numel() == size * (length - 1):
        found = target.reshape(size, length - 1)
    else:
        return None
    counted = found >= 0
    same = int(((found == tokens[:, 1:]) & counted).sum())
    itself = int(((found == tokens[:, :-1]) & counted).sum())
    if not (int(counted.sum()) > 3 and same >= 0.95 * int(counted.sum()) > itself):
        return None
    return torch.cat([counted, torch.zeros(size, 1, dtype=torch.bool)], 1)


def samples_verdict(probe: Probe, names: dict[str, Tensor]) -> Verdict:
    """Judge whether samples see each other in evaluation mode."""
    if probe.size < 2:
        return Verdict("samples", UNJUDGED, "the batch has one sample")
    others = [name for name, value in names.items() if value.dim() and not probe.has_samples(value)]
    shared = {(probe.length,), (probe.length, probe.length), (1, probe.length)}
    odd = [name for name in others if tuple(names[name].shape) not in shared]
    if odd or any(value.dim() > 1 and value.shape[0] == value.shape[1] == probe.size for value in names.values()):
        what = odd[0] if odd else "an input"
        reason = (
            f"{what} has another size than the number of samples, so the rows may be parts of one graph or sequence"
        )
        return Verdict("samples", UNJUDGED, reason)
    if not any(map(probe.is_of_samples, probe.base)):
        return Verdict("samples", UNJUDGED, "no output has one row for each sample")
    changed = evenly(probe.size, 4)
    found = {i: true_ones(probe.moved_samples(i)) for i in changed}
    pairs = [(i, j) for i, moved_ones in found.items() for j in moved_ones if i != j]
    if pairs:
        if is_second_dimension(probe):
            return Verdict("samples", FINE, f"the samples lie along dimension 1; {len(changed)} of them changed")
        i = pairs[0][0]
        where = probe.first_module(
            probe.sample_changed(i),
            lambda m: m.dim() > 0 and m.shape[0] == probe.size and bool(m[torch.arange(probe.size) != i].any()),
        )
        text = f"changing sample {i} of {probe.size} moves the outputs of {len(found[i]) - (i in found[i])} others"
        return Verdict("samples", FAULT, text + named(probe, where))
    if not all(i in ones for i, ones in found.items()):
        return Verdict("samples", UNJUDGED, "a changed sample did not even move its own output")
    return Verdict("samples", FINE, f"{len(changed)} of {probe.size} samples changed, each moves its own output only")


def is_second_dimension(probe: Probe) -> bool:
    """Return whether the samples lie along dimension 1, as in a sequence of shape (T, N, D)."""
    tensors = [leaf for leaf in probe.leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if any(leaf.dim() < 2 for leaf in tensors) or len({leaf.shape[1] for leaf in tensors}) != 1:
        return False
    args, kwargs = tree_unflatten(probe.leaves, probe.form)
    with Probe(probe.model, args, kwargs, batch_dim=1) as other:
        if other.size < 2 or not any(map(other.is_of_samples, other.base)):
            return False
        return all(true_ones(other.moved_samples(i)) == [i] for i in evenly(other.size, 3))


def named(probe: Probe, where: str) -> str:
    """Return in the output of which module it is seen first, in words."""
    if not where:
        return ""
    return f", first seen in the output of {where} ({type(probe.model.get_submodule(where)).__name__})"


def future_verdict(probe: Probe, predicted: Tensor | None) -> Verdict:
    """Judge whether a model sees the next token where it predicts it: where ``predicted`` is true, (N, T)."""
    if predicted is None:
        return Verdict("future", UNJUDGED, "no loss was seen whose targets are the next tokens (--causal says so)")
    if probe.length is None or not any(map(probe.is_of_positions, probe.base)):
        return Verdict("future", UNJUDGED, "no output has one vector for each token, (N, T, V)")
    found, mixes = 0, False
    for t in evenly(probe.length, MANY):
        moved_at, _, _ = probe.moved_positions(t)
        mixes |= bool(moved_at[:, t + 1 :].any())
        earlier = true_ones((moved_at & predicted)[:, :t].any(0))
        if earlier:
            where = probe.first_module(probe.token_changed(t), partial(moves_before, t=t, predicted=predicted))
            text = f"changing token {t} moves the outputs at {len(earlier)} earlier positions ({some(earlier)})"
            return Verdict("future", FAULT, text + named(probe, where))
        found += 1
    if not mixes:
        return Verdict(
            "future", UNJUDGED, "no output depends on an earlier token, so there is nothing that a mask hides"
        )
    return Verdict("future", FINE, f"{found} of {probe.length} tokens changed, none moves an earlier output")


def moves_before(moved_ones: Tensor, t: int, predicted: Tensor) -> bool:
    """Return whether the output of a module, (N, T, ...), moves at a predicting position before t."""
    if moved_ones.dim() < 3 or moved_ones.shape[:2] != predicted.shape:
        return False
    return bool((moved_ones.flatten(2).any(2) & predicted)[:, :t].any())


def some(numbers: Sequence[int]) -> str:
    """Return the first three numbers."""
    return ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")


def documents_verdict(probe: Probe, names: dict[str, Tensor], end_of_text: int | None) -> Verdict:
    """Judge whether documents that are packed into one sequence see each other."""
    documents, why = documents_of(probe, names, end_of_text)
    if documents is None:
        return Verdict(
            "documents", UNJUDGED, "no packed documents were seen: no document ids, no positions that begin anew"
        )
    if not any(map(probe.is_of_positions, probe.base)):
        return Verdict("documents", UNJUDGED, "no output has one vector for each token, (N, T, V)")
    mixes = 0
    inner = inner_positions(documents)
    for t in inner[: MANY // 2]:
        moved_at, _, _ = probe.moved_positions(t)
        same = documents == documents[:, t : t + 1]
        others = moved_at & ~same & is_inside(documents, t)
        mixes += int((moved_at & same).sum()) > int(moved_at[:, t].sum())
        if bool(others.any()):
            n, s = others.nonzero()[0].tolist()
            text = (
                f"changing token {t} of document {int(documents[n, t])} in sample {n} moves the output at position "
                f"{s}, in document {int(documents[n, s])} ({why})"
            )
            return Verdict("documents", NOTE if why.startswith("end") else FAULT, text)
    if not inner or not mixes:
        return Verdict("documents", UNJUDGED, "no output depends on another token of its document")
    return Verdict("documents", FINE, f"{len(inner[: MANY // 2])} tokens changed, none moves another document ({why})")


def documents_of(probe: Probe, names: dict[str, Tensor], end_of_text: int | None) -> tuple[Tensor | None, str]:
    """Return the number of the document of each token, (N, T), and how it is known; None if there is only one."""
    if probe.tokens is None or probe.tokens.dim() < 2:
        return None, ""
    shape = probe.tokens.shape[:2]
    real, _ = real_tokens(probe, names)
    for name, value in names.items():
        if value.shape != shape or value.is_floating_point() or value is probe.tokens:
            continue
        steps = value[:, 1:].long() - value[:, :-1].long()
        inside = torch.ones_like(steps, dtype=torch.bool) if real is None else real[:, 1:] & real[:, :-1]
        several = bool((steps[inside] != 0).any())
        counts = len(value.unique())
        if (several and re.search(r"doc|seq\w*_?ids?$", name)) or (re.search("segment", name) and counts > 3):
            return value.long(), f"argument {name}"
        if re.search(r"pos", name) and bool((steps[inside] < 0).any()):
            begins = torch.cat([torch.zeros_like(value[:, :1], dtype=torch.bool), steps < 0], 1)
            return begins.long().cumsum(1), f"argument {name} begins anew"
    if end_of_text is not None and probe.tokens.dim() == 2:
        ends = (probe.tokens == end_of_text).long()
        if bool(ends[:, :-1].any()):
            return ends.cumsum(1) - ends, f"end of text: token {end_of_text}"
    return None, ""


def inner_positions(documents: Tensor) -> list[int]:
    """Return positions that are the middle of some document: its first or last token may tell the model its limits."""
    found = []
    for row in documents:
        begins = [0, *(k for k in range(1, len(row)) if row[k] != row[k - 1]), len(row)]
        found += [(a + b) // 2 for a, b in itertools.pairwise(begins) if b - a > 2]
    return list(dict.fromkeys(found))


def is_inside(documents: Tensor, t: int) -> Tensor:
    """Return, for each sample (N, 1), whether position t is neither the first nor the last token of a document."""
    inside = torch.ones(len(documents), dtype=torch.bool)
    for other in (t - 1, t + 1):
        if 0 <= other < documents.shape[1]:
            inside &= documents[:, other] == documents[:, t]
    return inside[:, None]


def padding_verdict(probe: Probe, names: dict[str, Tensor]) -> Verdict:
    """Judge whether padding moves the outputs of real tokens."""
    real, mask = real_tokens(probe, names)
    if real is None:
        return cut_padding_verdict(probe)
    padded = true_ones((~real).any(0))
    if not any(map(probe.is_of_positions, probe.base)) and not any(map(probe.is_of_samples, probe.base)):
        return Verdict("padding", UNJUDGED, "no output has one row for each sample")
    for t in [padded[k] for k in evenly(len(padded), MANY // 2)]:
        moved_at, unclear, whole = probe.moved_positions(t)
        hidden = ~real[:, t]
        wrong = (moved_at | unclear) & real & hidden[:, None]
        if bool(wrong.any()) or bool((whole & hidden & real.any(1)).any()):
            n = int((wrong.any(1) | (whole & hidden)).nonzero()[0])
            what = f"the outputs of {int(wrong[n].sum())} real tokens" if bool(wrong[n].any()) else "its output"
            text = f"changing token {t} of sample {n}, which is padding in the argument {mask}, moves {what}"
            return Verdict("padding", FAULT, text)
    return Verdict("padding", FINE, f"{min(len(padded), MANY // 2)} padded positions changed (argument {mask})")


def real_tokens(probe: Probe, names: dict[str, Tensor]) -> tuple[Tensor | None, str]:
    """Return where tokens are real, (N, T), and the argument that says so; None if no argument hides any."""
    if probe.tokens is None:
        return None, ""
    for name, value in names.items():
        if (
            value.shape != probe.tokens.shape[:2]
            or not re.search(r"mask", name)
            or re.search(r"loss|label|special", name)
        ):
            continue
        if not set(value.unique().tolist()) <= {0, 1}:
            continue
        real = ~value.bool() if re.search(r"pad", name) else value.bool()
        tail = tail_lengths(probe.tokens)
        if tail is not None:  # the padding itself shows which value means padding
            padded = torch.arange(value.shape[1]) >= (value.shape[1] - tail)[:, None]
            if bool(real[padded].all()) and not bool(real[~padded].any()):
                real = ~real
        elif not bool(real[:, 0].any()) and not bool(real[:, -1].all()):
            # The longest sequence has no padding at either end. So what is at the begin of all sequences is real.
            real = ~real
        if not bool(real.all()) and bool(real.any()):
            return real, name
    return None, ""


def tail_lengths(tokens: Tensor) -> Tensor | None:
    """Return how many tokens at the end of each row are padding, (N,); None if there is none.

    Padding is one value that ends some row three times or more, and stands nowhere else.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 4 or tokens.is_floating_point():
        return None
    for value in tokens[:, -1].unique().tolist():
        equal = tokens == value
        tail = equal.flip(1).long().cumprod(1).sum(1)
        if bool((equal.sum(1) == tail).all()) and int(tail.max()) >= 3 and int(tail.max()) < tokens.shape[1]:
            return tail
    return None


def cut_padding_verdict(probe: Probe) -> Verdict:
    """Judge whether the outputs change if less padding follows: of a batch without a mask."""
    nothing = "no padding was seen: no mask, no constant tokens at the end"
    tail = tail_lengths(probe.tokens) if probe.tokens is not None else None
    if tail is None or probe.length is None or probe.length == probe.size:
        return Verdict("padding", UNJUDGED, nothing)
    length = probe.length
    real = length - tail
    upto = int(real[real < length].max())
    rows = real <= upto

    def cut(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        shorter: Tensor = leaf[rows] if probe.has_samples(leaf) else leaf
        for dim, size in enumerate(shorter.shape):
            if size == length:
                shorter = shorter.narrow(dim, 0, upto)
        return shorter

    try:
        shorter = probe.call([cut(leaf) for leaf in probe.leaves])
    except Exception as error:
        return Verdict("padding", UNJUDGED, f"the model cannot be called with less padding: {type(error).__name__}")
    looked = False
    for before, after in zip(probe.base, shorter, strict=True):
        if not probe.is_of_samples(before) or before.dim() > 3:
            continue
        before = before[rows]
        if probe.is_of_positions(before) or (before.dim() == 3 and before.shape[1] == length):
            before = before[:, :upto]
            counted = torch.arange(upto) < real[rows][:, None]
        else:
            counted = torch.ones(len(before), dtype=torch.bool)
        if before.shape != after.shape:
            continue
        looked = True
        scale = float(before.abs().max()) or 1.0
        wrong = ((before - after).abs() > 10 * ROUNDING.get(least_precise(before), 1e-5) * scale) & counted.reshape(
            *counted.shape, *[1] * (before.dim() - counted.dim())
        )
        if bool(wrong.any()):
            text = (
                f"with {length - upto} padded positions less, the outputs of {int(wrong.flatten(1).any(1).sum())} of "
                f"{len(before)} samples move, and the model gets no mask"
            )
            return Verdict("padding", NOTE, text)
    if not looked:
        return Verdict("padding", UNJUDGED, "no output has one row for each sample")
    return Verdict("padding", FINE, f"the same outputs with {length - upto} padded positions less")
